"""The pass "un-remat": values that `jax.checkpoint` recomputes are saved instead.

Its backward regions are inlined, and values in them that the forward pass computed too
are read from there: directly in the same region, in a loop from stacks of the forward
loop. Values that are cheap to compute from arguments and slices are still recomputed.
The residuals of the backward pass may then be chosen from scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rhino_jax._compat import without_dead_code
from rhino_jax.frontend.regions import PLAIN_CALLS, REMATS
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import UN_REMAT, Transform
from rhino_jax.passes.program_pass import (
    ChoiceLimits,
    Gain,
    ProgramPass,
    Trial,
    TrialKind,
)
from rhino_jax.passes.remat.emit import emit, is_recomputed
from rhino_jax.passes.remat.late import Halves, halves_of
from rhino_jax.passes.remat.rerun import (
    NOTHING,
    Decided,
    LoopPair,
    changeable_regions,
    stacked_anew,
)
from rhino_jax.rewrite.flat import FlatProgram, FlatRegion
from rhino_jax.rewrite.flatten import flatten, plain_calls
from rhino_jax.rewrite.numbers import ValueNumbers
from rhino_jax.rewrite.retraced import retraced


ALL = "all"


def drop_remat(closed_jaxpr: Any, program: Program, choice: str) -> Any:
    """Retrace a function without `jax.checkpoint`.

    Args:
      closed_jaxpr, program: the function.
      choice: `ALL`.
    """
    assert choice == ALL, choice
    calls = plain_calls(program, PLAIN_CALLS | REMATS)
    flat = flatten(program, closed_jaxpr, calls)
    numbers = ValueNumbers(flat)
    # Values in remat regions that their own region computed before are read from there.
    same = {
        v: other
        for _, block in changeable_regions(flat)
        for early in [_early(numbers, halves_of(block))]
        for v, other in _replaced(numbers, block, early).items()
        if block.maker[other] < block.maker[v]
    }
    flat = flatten(program, closed_jaxpr, calls, same)
    decided = {at: _decide(flat, numbers, of) for at, of in changeable_regions(flat)}
    made = retraced(closed_jaxpr, lambda *arrays: emit(flat, decided, arrays))
    return without_dead_code(made)


def has_remat(program: Program) -> bool:
    """Whether a program has regions of `jax.checkpoint`."""
    return any(op.call is not None and op.call.is_remat for op in program.ops)


def _choices(traced: Traced, limits: ChoiceLimits) -> Iterator[Transform]:
    """Yield the pass that saves everything that `jax.checkpoint` would recompute."""
    if has_remat(traced.program):
        yield Transform(UN_REMAT, 0, 0, ALL)


PASS = ProgramPass(
    UN_REMAT,
    drop_remat,
    _choices,
    Trial(TrialKind.BASIS, lambda choice: "no remat", "recompute", gain=Gain.TIME),
)


def _early(numbers: ValueNumbers, halves: Halves) -> dict[int, int]:
    """Return number → the first value of the forward pass that has it."""
    lines = zip(reversed(halves.block.ops), reversed(halves.is_late), strict=True)
    return {numbers.of[v]: v for line, late in lines if not late for v in line.results}


def _decide(flat: FlatProgram, numbers: ValueNumbers, block: FlatRegion) -> Decided:
    halves = halves_of(block)
    loops = [k for k, line in enumerate(block.ops) if flat.can_change(line)]
    late, early = [k for k in loops if halves.is_late[k]], _early(numbers, halves)
    pairs = {k: _pairs(numbers, halves, loops, k, early) for k in late}
    added = stacked_anew(block, pairs)
    return Decided(halves, pairs=pairs, added=added)


def _replaced(
    numbers: ValueNumbers, block: FlatRegion, have: dict[int, int]
) -> dict[int, int]:
    """Return values in remat regions that are already available → the equal value."""
    cheap = _cheap(numbers, block)
    found: dict[int, int] = {}
    for line in block.ops:
        if not is_recomputed(line) or line.op.id in cheap:
            continue
        for v in line.results:
            other = have.get(numbers.of.get(v, -1))
            if other is not None and other != v:
                found[v] = other
    return found


def _cheap(numbers: ValueNumbers, block: FlatRegion) -> set[int]:
    """Return ids of fusible ops in remat regions that are cheap to run again.

    Such an op reads only inputs, literals, or results of other such ops.
    """
    program = numbers.flat.program
    values, ops = set(block.inputs), set()
    for line in block.ops:
        if is_recomputed(line) and line.op.is_fusible:
            if all(v in values or program.values[v].is_literal for v in line.operands):
                values.update(line.results)
                ops.add(line.op.id)
    return ops


def _pairs(
    numbers: ValueNumbers,
    halves: Halves,
    loops: list[int],
    k: int,
    early: dict[int, int],
) -> tuple[LoopPair, ...]:
    """Return values that a backward loop reads of forward bodies, and of outside."""
    block = halves.block
    backward = block.ops[k]
    body, length = backward.regions[0], backward.call.trip_count
    before = {number: v for number, v in early.items() if block.maker[v] < k}
    outside = _replaced(numbers, body, before)
    rest = dict(outside)
    found = [LoopPair(None, {}, NOTHING, outside)]
    for f in loops:
        forward = block.ops[f]
        if f >= k or halves.is_late[f] or forward.call.trip_count != length:
            continue
        inner = forward.regions[0]
        have = {numbers.of[v]: v for line in reversed(inner.ops) for v in line.results}
        have |= {numbers.of[v]: v for v in inner.inputs}
        replaced = _replaced(numbers, body, have)
        replaced = {v: u for v, u in replaced.items() if v not in rest}
        rest |= replaced
        found.append(LoopPair(f, {}, NOTHING, replaced))
    return tuple(found)
