"""Find windowed einsums: matmul–collective pairs decomposed into permutes.

XLA computes `all_gather(x) @ w` and `reduce_scatter(x @ w)` shard by shard, and passes
the shards (or the partial sums) around the ring of devices meanwhile: a "windowed dot
general". What remains of the collective is a loop with `windowed_dot_general_body_ag`
or `…_rs` in the name of its body and permutes in it, and one more permute before or
after the loop where it uses both ring directions. A loop with a single trip is unrolled
and leaves the permutes alone (`unrolled`).

Source: XLA, xla/service/spmd/dot_handler.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rhino_jax.verify.hlo.collectives.permutes import (
    Permute,
    is_of_product,
    origin,
    ring_permute,
)
from rhino_jax.verify.hlo.collectives.unrolled import find_gathers, find_scatters
from rhino_jax.verify.hlo.module import Computation, Instruction, Module, called_names


_BODY = re.compile(r"windowed_dot_general_body_(ag|rs)")
_KINDS = {"ag": "all-gather", "rs": "reduce-scatter"}


@dataclass(frozen=True, slots=True)
class Window:
    """Permutes of one computation that implement one kind of collective.

    Attributes:
      kind: "all-gather" or "reduce-scatter".
      count: number of collectives, per run of the computation.
      outer: the permutes of this computation, in printed order.
      loop: the `while` that they belong to, or None where it was unrolled.
      inner: the permutes of the loop's body.
    """

    kind: str
    count: int
    outer: tuple[Permute, ...]
    loop: Instruction | None = None
    inner: tuple[Permute, ...] = ()

    @property
    def first(self) -> Instruction:
        """The instruction at which the window is counted."""
        return self.loop or self.outer[0].instruction

    def runs(self, trips: int) -> Iterator[tuple[Permute, int]]:
        """Yield every permute with its number of runs in `trips` trips of the loop."""
        yield from ((permute, 1) for permute in self.outer)
        for permute in self.inner:
            yield permute, max(0, trips - permute.skips_last)


def find_windows(module: Module, computation: Computation) -> tuple[Window, ...]:
    """Find the permutes of a computation that implement all-gathers or reduce-scatters.

    Permutes that cannot be attributed stay permutes, as do those of the user.
    """
    num_devices = module.num_partitions
    permutes = {
        instruction.name: permute
        for instruction in computation
        if (permute := ring_permute(computation, instruction, num_devices)) is not None
        and is_of_product(instruction)
    }
    windows = list(_loops(module, computation, permutes))
    for window in windows:
        for permute in window.outer:
            permutes.pop(permute.name, None)
    for group in _alike(permutes.values()):
        gathers, rest = find_gathers(group)
        if gathers:
            used = tuple(p for p in group if p not in rest)
            windows.append(Window("all-gather", gathers, used))
        scatters = find_scatters(rest)
        if scatters:
            windows.append(Window("reduce-scatter", scatters, tuple(rest)))
    return tuple(windows)


def _alike(permutes: Iterable[Permute]) -> Iterable[list[Permute]]:
    """Group permutes by operation, size and rings, in either direction."""
    groups: dict[object, list[Permute]] = {}
    for permute in permutes:
        instruction = permute.instruction
        rings = frozenset(frozenset(pair) for pair in permute.shift.items())
        key = (instruction.op_name, instruction.source, permute.bytes, rings)
        groups.setdefault(key, []).append(permute)
    return groups.values()


def _loops(
    module: Module, computation: Computation, permutes: Mapping[str, Permute]
) -> Iterator[Window]:
    for loop in computation:
        if loop.opcode != "while":
            continue
        name = loop.attribute("body")
        kind = _BODY.search(name)
        if kind is None:
            continue
        inner = tuple(_inner(module, module.computations[name]))
        if inner:
            outer = (
                permute
                for permute in permutes.values()
                if _is_like(permute, inner) and _touches(permute, loop)
            )
            yield Window(_KINDS[kind.group(1)], 1, tuple(outer), loop, inner)


def _inner(module: Module, body: Computation) -> Iterator[Permute]:
    num_devices = module.num_partitions
    for instruction in body:
        if (permute := ring_permute(body, instruction, num_devices)) is not None:
            yield permute
        elif instruction.opcode == "conditional":
            # XLA:GPU sends the shards in all trips but the last.
            for name in called_names(instruction):
                branch = module.computations[name]
                for x in branch:
                    permute = ring_permute(branch, x, num_devices, skips_last=True)
                    if permute is not None:
                        yield permute


def _is_like(permute: Permute, inner: Sequence[Permute]) -> bool:
    return any(
        permute.bytes == other.bytes and permute.shift == other.shift for other in inner
    )


def _touches(permute: Permute, loop: Instruction) -> bool:
    """Whether a permute's value enters a loop's state, or comes out of it."""
    if permute.source is loop:
        return True
    state = permute.computation.instructions[loop.operands[0]]
    return any(
        origin(permute.computation, x) is permute.instruction for x in state.operands
    )
