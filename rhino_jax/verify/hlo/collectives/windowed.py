"""Find windowed einsums: matmul–collective pairs decomposed into permutes.

XLA computes `all_gather(x) @ w` and `reduce_scatter(x @ w)` shard by shard, and passes
the shards (or the partial sums) around the ring of devices meanwhile: a "windowed dot
general". What remains of the collective is a loop with `windowed_dot_general_body_ag`
or `…_rs` in the name of its body and permutes in it, and one more permute before or
after the loop where it uses both ring directions. A loop with a single trip is unrolled
and leaves the permutes alone (`unrolled`).

Source: XLA, xla/service/spmd/dot_handler.cc.

Its permutes send along a ring of devices (`ring_permute`); unrolled ones are recognised
by their dataflow: of an unrolled "windowed dot general" only the permutes are left, all
of the same operation. If they pass one value on unchanged until every device has seen
that of every other one, they are an all-gather. If something is added to a value before
it is sent on, they are a reduce-scatter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rhino_jax.ir.collectives import ALL_GATHER, PERMUTE, REDUCE_SCATTER
from rhino_jax.verify.hlo.collectives.groups import parse_pairs
from rhino_jax.verify.hlo.collectives.payload import payload_bytes
from rhino_jax.verify.hlo.module import Computation, Instruction, Module, called_names


# Op names of the partitioner's permutes; a user's `ppermute` has its own name.
_PRODUCT = re.compile(r"(?:^|/)(?:dot_general|conv_general_dilated)$")
_PERMUTES = (PERMUTE, f"{PERMUTE}-start")
_PASSES = frozenset(
    "bitcast collective-permute-done copy copy-done copy-start get-tuple-element"
    " reshape transpose".split()
)


@dataclass(frozen=True, slots=True)
class Permute:
    """A collective-permute around a ring.

    Attributes:
      computation: the computation that contains it.
      instruction: the permute, or its start.
      shift: device → the device that it sends to.
      bytes: bytes that one device sends.
      ring_size: number of devices of each ring.
      skips_last: whether the last trip of the loop around it skips it.
    """

    computation: Computation
    instruction: Instruction
    shift: Mapping[int, int]
    bytes: int
    ring_size: int
    skips_last: bool = False

    @property
    def name(self) -> str:
        return self.instruction.name

    @property
    def source(self) -> Instruction:
        """The instruction that defines the value that is sent."""
        return self.computation.origin(self.instruction.operands[0], _PASSES)


def ring_permute(
    computation: Computation,
    instruction: Instruction,
    num_devices: int,
    *,
    skips_last: bool = False,
) -> Permute | None:
    """Return the ring permute that an instruction is, or None.

    None, too, where some device does not take part, or rings differ in size.
    """
    if instruction.opcode not in _PERMUTES:
        return None
    shift = dict(parse_pairs(instruction.attributes))
    size = _ring_size(shift)
    if size < 2 or len(shift) != num_devices:
        return None
    sent_bytes = payload_bytes(computation, instruction)
    return Permute(computation, instruction, shift, sent_bytes, size, skips_last)


def _ring_size(shift: Mapping[int, int]) -> int:
    """Return the number of devices of a ring; 0 without one, or where sizes differ."""
    if set(shift) != set(shift.values()):
        return 0
    sizes = set()
    left = set(shift)
    while left:
        start = at = left.pop()
        size = 1
        while (at := shift[at]) != start:
            left.discard(at)
            size += 1
        sizes.add(size)
    return sizes.pop() if len(sizes) == 1 else 0


def is_of_product(instruction: Instruction) -> bool:
    """Whether an instruction derives from a matmul or a convolution."""
    return _PRODUCT.search(instruction.op_name) is not None


_COMPUTES = ("convolution", "custom-call", "dot", "fusion")
_SUMS = ("add", "fusion")
_FILLS = ("broadcast", "constant")


def find_gathers(group: Sequence[Permute]) -> tuple[int, list[Permute]]:
    """Return the number of all-gathers among equivalent permutes, and the rest."""
    by_name = {permute.name: permute for permute in group}
    trees: dict[str, list[Permute]] = {}
    shown: dict[str, list[tuple[int, ...]]] = {}
    roots: dict[str, Instruction] = {}
    for permute in group:
        path = [permute]
        while (source := path[-1].source).name in by_name:
            path.append(by_name[source.name])
        roots[source.name] = source
        trees.setdefault(source.name, []).append(permute)
        shown.setdefault(source.name, []).append(_comes_from(path))
    found = [name for name in roots if _is_gather(roots[name], shown[name], group[0])]
    used = {permute.name for name in found for permute in trees[name]}
    return len(found), [permute for permute in group if permute.name not in used]


def _comes_from(path: Sequence[Permute]) -> tuple[int, ...]:
    """Return the device whose value each device has at the start of a path.

    `path` has the last permute first.
    """
    whose = {device: device for device in path[0].shift}
    for permute in reversed(path):
        whose = {target: whose[source] for source, target in permute.shift.items()}
    return tuple(whose[device] for device in sorted(whose))


def _is_gather(
    root: Instruction, shown: Sequence[tuple[int, ...]], permute: Permute
) -> bool:
    """Whether each device sees the root's value of every other one, once."""
    if root.opcode in _FILLS or (is_of_product(root) and root.opcode in _COMPUTES):
        return False
    own = tuple(sorted(permute.shift))
    others = {x for x in shown if all(a != b for a, b in zip(x, own, strict=True))}
    return len(others) == len(shown) == permute.ring_size - 1


def find_scatters(group: Sequence[Permute]) -> int:
    """Return the number of reduce-scatters that equivalent permutes implement, or 0."""
    names = {permute.name for permute in group}
    ends = set(names)
    for permute in group:
        source = permute.source
        if source.name in names:
            return 0
        if source.opcode in _SUMS:
            for operand in source.operands:
                ends.discard(permute.computation.origin(operand, _PASSES).name)
    # With both ring directions, each collective ends with one permute per direction.
    ways = len({tuple(permute.shift.items()) for permute in group})
    count, rest = divmod(len(ends), ways) if ways else (0, 0)
    # Sums that start from zeros may send these first, in both directions.
    size = group[0].ring_size if group else 0
    is_scatter = count * (size - 1) <= len(group) <= count * (size + 1)
    return count if is_scatter and not rest else 0


_BODY = re.compile(r"windowed_dot_general_body_(ag|rs)")
_KINDS = {"ag": ALL_GATHER, "rs": REDUCE_SCATTER}


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
            windows.append(Window(ALL_GATHER, gathers, used))
        scatters = find_scatters(rest)
        if scatters:
            windows.append(Window(REDUCE_SCATTER, scatters, tuple(rest)))
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
        permute.computation.origin(x, _PASSES) is permute.instruction
        for x in state.operands
    )
