"""The pass "un-remat": values that `jax.checkpoint` recomputes are saved instead.

Its backward regions are inlined, and values in them that the forward pass computed too
are read from there: directly in the same region, in a loop from stacks of the forward
loop. Values that are cheap to compute from arguments and slices are still recomputed.
The residuals of the backward pass may then be chosen from scratch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rhino_jax.frontend.regions import REMATS
from rhino_jax.ir.program import Program
from rhino_jax.passes.remat.decided import Decided, LoopPair, stacked_anew
from rhino_jax.passes.remat.emit import emit
from rhino_jax.passes.remat.equations import equations
from rhino_jax.passes.remat.frame import RematPlan
from rhino_jax.passes.remat.late import Halves, halves_of
from rhino_jax.passes.remat.numbers import ValueNumbers
from rhino_jax.passes.remat.regions import INLINED, FlatRegion, FlatRegions, RegionOp
from rhino_jax.passes.remat.rerun import NOTHING
from rhino_jax.passes.remat.residual_stacks import call_of, can_be_changed
from rhino_jax.passes.retraced import retraced


ALL = "all"


def kept_instead(closed_jaxpr: Any, program: Program, choice: str) -> Any:
    """Retrace a function without `jax.checkpoint`.

    Args:
      closed_jaxpr, program: the function.
      choice: `ALL`.
    """
    assert choice == ALL, choice
    blocks = FlatRegions(program, INLINED | REMATS)
    found = equations(closed_jaxpr, program)
    numbers = ValueNumbers(blocks, found)
    decided: dict[int | None, Decided] = {}
    _decide(blocks, numbers, None, blocks.top, decided)
    plan = RematPlan(blocks, found, decided)
    return retraced(closed_jaxpr, lambda *arrays: emit(plan, arrays))


def has_remat(program: Program) -> bool:
    """Whether a program has regions of `jax.checkpoint`."""
    return any(op.call is not None and op.call.is_remat for op in program.ops)


def _decide(
    blocks: FlatRegions,
    numbers: ValueNumbers,
    owner: int | None,
    block: FlatRegion,
    found: dict[int | None, Decided],
) -> None:
    halves = halves_of(block)
    early = {numbers.of[v]: v for v in _made_early(halves)}
    same = {
        v: other
        for v, other in _replaced(numbers, block, early).items()
        if block.maker[other] < block.maker[v]
    }
    found[owner] = Decided(halves, NOTHING, same=same, skipped=_skipped(block, same))
    loops = [k for k, line in enumerate(block.lines) if can_be_changed(blocks, line)]
    for k in loops:
        op = block.lines[k].op
        _decide(blocks, numbers, op.id, blocks.of(op), found)
    pairs: dict[int, tuple[LoopPair, ...]] = {}
    added: dict[int, dict[int, None]] = defaultdict(dict)
    for k in loops:
        if not halves.is_late[k]:
            continue
        several = _pairs(blocks, numbers, halves, loops, k, early)
        body = found[block.lines[k].op.id]
        inside = dict(body.same)
        for pair in several:
            inside.update(pair.replaced)
        found[block.lines[k].op.id] = replace(
            body, skipped=_skipped(body.block, inside)
        )
        pairs[k] = several
        for pair in several:
            if pair.loop is None:
                continue
            for v in stacked_anew(blocks, block, pair):
                added[pair.loop][v] = None
    stacks = {loop: tuple(values) for loop, values in added.items()}
    found[owner] = replace(found[owner], pairs=pairs, added=stacks)


def _made_early(halves: Halves) -> Iterator[int]:
    for k in reversed(range(len(halves.block.lines))):
        if not halves.is_late[k]:
            yield from halves.block.lines[k].makes


def _is_again(line: RegionOp) -> bool:
    """Whether an op is in a region of `jax.checkpoint`."""
    return any(op.call is not None and op.call.is_remat for op in line.within)


def _replaced(
    numbers: ValueNumbers, block: FlatRegion, have: dict[int, int]
) -> dict[int, int]:
    """Return values in remat regions that are already available → the equal value."""
    cheap = _cheap(numbers, block)
    found: dict[int, int] = {}
    for line in block.lines:
        if not _is_again(line) or line.op.id in cheap:
            continue
        for v in line.makes:
            other = have.get(numbers.of.get(v, -1))
            if other is not None and other != v:
                found[v] = other
    return found


def _cheap(numbers: ValueNumbers, block: FlatRegion) -> set[int]:
    """Return ids of fusible ops in remat regions that are cheap to run again.

    Such an op reads only inputs, literals, or results of other such ops.
    """
    program = numbers.blocks.program
    values, ops = set(block.inputs), set()
    for line in block.lines:
        if _is_again(line) and line.op.is_fusible:
            if all(v in values or program.values[v].is_literal for v in line.reads):
                values.update(line.makes)
                ops.add(line.op.id)
    return ops


def _skipped(block: FlatRegion, replaced: dict[int, int]) -> frozenset[int]:
    """Return positions of ops in remat regions whose results are no longer read."""
    needed = set(block.outputs)
    found: set[int] = set()
    for k in reversed(range(len(block.lines))):
        line = block.lines[k]
        makes = [v for v in line.makes if v not in replaced]
        if _is_again(line) and needed.isdisjoint(makes):
            found.add(k)
        else:
            needed.update(line.reads)
    return frozenset(found)


def _pairs(
    blocks: FlatRegions,
    numbers: ValueNumbers,
    halves: Halves,
    loops: list[int],
    k: int,
    early: dict[int, int],
) -> tuple[LoopPair, ...]:
    """Return values that a backward loop reads of forward bodies, and of outside."""
    block = halves.block
    backward = block.lines[k]
    body, length = blocks.of(backward.op), call_of(backward).trip_count
    before = {number: v for number, v in early.items() if block.maker[v] < k}
    outside = _replaced(numbers, body, before)
    rest = dict(outside)
    found: list[tuple[int | None, dict[int, int]]] = [(None, outside)]
    for f in loops:
        forward = block.lines[f]
        if f >= k or halves.is_late[f] or call_of(forward).trip_count != length:
            continue
        inner = blocks.of(forward.op)
        have = {numbers.of[v]: v for line in reversed(inner.lines) for v in line.makes}
        have |= {numbers.of[v]: v for v in inner.inputs}
        replaced = _replaced(numbers, body, have)
        replaced = {v: u for v, u in replaced.items() if v not in rest}
        rest |= replaced
        found.append((f, replaced))
    read = _read(body, rest)
    return tuple(
        LoopPair(f, {}, NOTHING, {v: u for v, u in replaced.items() if v in read})
        for f, replaced in found
    )


def _read(block: FlatRegion, replaced: dict[int, int]) -> set[int]:
    skipped = _skipped(block, replaced)
    found = set(block.outputs)
    for k, line in enumerate(block.lines):
        if k not in skipped:
            found.update(line.reads)
    return found
