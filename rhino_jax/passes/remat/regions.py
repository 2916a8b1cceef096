"""Regions as flat lists of ops, calls without semantics of their own inlined.

Analyses of a program and rewrites of its jaxpr see the same ops, with the same value
ids.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from rhino_jax.ir.program import Op, Program, Region, RegionKind


INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})
"""Calls that mean no more than their bodies."""

NEVER_AGAIN = frozenset({
    "debug_callback", "debug_print", "io_callback", "pure_callback", "python_callback",
    "get", "swap", "addupdate", "new_ref", "ref_set", "infeed", "outfeed", "run_state",
    "run_scoped", "ref_get", "ref_swap", "ref_addupdate", "freeze", "core_call_ref",
    "create_token", "after_all",
})  # fmt: skip
"""Primitives with side effects, or that hide what they do: they never run twice."""


@dataclass(frozen=True, slots=True)
class RegionOp:
    """An op that runs in a region, or in a call that was inlined there.

    Attributes:
      op: the op.
      within: the calls around it, outermost first.
      reads: ids of its operands; for the input of an inlined call, that of its
        argument.
      makes: ids of its results.
    """

    op: Op
    within: tuple[Op, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FlatRegion:
    """A region as a flat list of ops.

    Attributes:
      inputs, outputs: value ids, as of the region; for an output that an inlined call
        computes, the id inside of the call.
      lines: the ops, in order.
      maker: value id → position of the op that computes it.
      alias: id of a result of an inlined call → id of the same value inside of it.
    """

    inputs: tuple[int, ...]
    lines: tuple[RegionOp, ...]
    outputs: tuple[int, ...]
    maker: dict[int, int]
    alias: dict[int, int]

    def named(self, value: int) -> int:
        """Return the id by which the region's ops refer to a value."""
        return self.alias.get(value, value)


def block_of(
    program: Program, region: Region, entered: frozenset[str] = INLINED
) -> FlatRegion:
    """Flatten a region of a program.

    Args:
      program: the program.
      region: the region.
      entered: primitive names of calls to inline.
    """
    lines: list[RegionOp] = []
    alias: dict[int, int] = {}

    def enter(inner: Region, within: tuple[Op, ...]) -> None:
        for op_id in inner.ops:
            op = program.ops[op_id]
            reads = tuple(alias.get(v, v) for v in op.operands)
            if not is_entered(program, op, entered):
                lines.append(RegionOp(op, within, reads, op.results))
                continue
            assert op.call is not None
            (body,) = op.call.regions
            alias.update(zip(body.inputs, reads, strict=True))
            enter(body, (*within, op))
            left = [alias.get(v, v) for v in body.outputs]
            alias.update(zip(op.results, left, strict=True))

    enter(region, ())
    return FlatRegion(
        region.inputs,
        tuple(lines),
        tuple(alias.get(v, v) for v in region.outputs),
        {v: k for k, line in enumerate(lines) for v in line.makes},
        alias,
    )


def is_entered(program: Program, op: Op, entered: frozenset[str]) -> bool:
    """Whether a call is inlined: it has such a name and captures no arrays."""
    if op.name not in entered or op.call is None or op.call.kind is not RegionKind.CALL:
        return False
    return not holds_arrays(program, op.call.regions[0])


def holds_arrays(program: Program, region: Region) -> bool:
    """Whether a region, or one inside of it, captures arrays as constants."""
    for op_id in region.ops:
        op = program.ops[op_id]
        if any(_is_array(program, v) for v in op.operands):
            return True
        if op.call and any(holds_arrays(program, r) for r in op.call.regions):
            return True
    return any(_is_array(program, v) for v in region.outputs)


def _is_array(program: Program, value: int) -> bool:
    found = program.values[value]
    return found.is_literal and found.rank > 0


def may_run_again(program: Program, op: Op) -> bool:
    """Whether an op is pure: it may run twice with the same results."""
    if op.name in NEVER_AGAIN:
        return False
    regions = op.call.regions if op.call is not None else ()
    return all(
        may_run_again(program, program.ops[inner]) for r in regions for inner in r.ops
    )


class FlatRegions:
    """The flat regions of a program, each computed on first use."""

    def __init__(
        self,
        program: Program,
        entered: frozenset[str] = INLINED,
        *,
        is_top_entered: bool = True,
    ) -> None:
        self.program, self.entered = program, entered
        self._of_top = entered if is_top_entered else frozenset[str]()
        self._found: dict[tuple[int, int], FlatRegion] = {}

    @functools.cached_property
    def top(self) -> FlatRegion:
        """Flattened ops of the whole program."""
        return block_of(self.program, self.program.body, self._of_top)

    def of(self, op: Op, region: int = 0) -> FlatRegion:
        """Return the flat region of an op.

        Args:
          op: an op with regions.
          region: index of the region among the op's.
        """
        assert op.call is not None
        key = op.id, region
        if key not in self._found:
            inner = op.call.regions[region]
            self._found[key] = block_of(self.program, inner, self.entered)
        return self._found[key]

    def all(self) -> Iterator[tuple[Op | None, FlatRegion]]:
        """Yield every region with the op that it belongs to, outer ones first."""
        todo: list[tuple[Op | None, FlatRegion]] = [(None, self.top)]
        while todo:
            owner, block = todo.pop(0)
            yield owner, block
            for line in block.lines:
                call = line.op.call
                for k in range(len(call.regions) if call else 0):
                    todo.append((line.op, self.of(line.op, k)))
