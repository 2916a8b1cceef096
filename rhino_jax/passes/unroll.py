"""The pass "unroll": loops over layers are unrolled, layer by layer.

XLA:GPU writes what a forward loop stacks for the backward loop to memory, and reads it
back, in kernels of their own (`Device.copies_stacks`). Unrolled, each layer's
residuals stay where they are computed. A GPT of 16 layers on one H200, all residuals
saved, takes 412 ms in two loops and 279 ms unrolled; compiling takes 7.6 instead of
4.4 s. Loops that recompute their layers have little to stack, and stay.

Loops are unrolled in pairs: one stacks what the other slices, forward and backward.
Stacks that only such loops read and write are never built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rhino_jax._compat import bind_eqn, jaxpr_consts, open_jaxpr
from rhino_jax.frontend.regions import (
    evaluate,
    inline_call,
    inner_equations,
    rebuild_jaxpr,
    with_bodies,
)
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import UNROLL, Transform, chosen
from rhino_jax.passes.program_pass import (
    ChoiceLimits,
    Gain,
    ProgramPass,
    Trial,
    TrialKind,
)
from rhino_jax.passes.remat.unremat import has_remat
from rhino_jax.rewrite.emit import is_plain_call
from rhino_jax.rewrite.flat import FlatOp, FlatRegion
from rhino_jax.rewrite.flatten import flatten
from rhino_jax.rewrite.retraced import retraced
from rhino_jax.rewrite.trips import ArraySlices, array_of, run_trips


MAX_TRIPS = 32
"""Trips of the longest loop that is unrolled: compile time grows with them."""


def unrolled(closed: Any, program: Program, choice: str) -> Any:
    """Retrace a function with its pairs of loops unrolled.

    Args:
      closed, program: the function.
      choice: `{"max_trips": n}`, of the loops to unroll.
    """
    max_trips = int(Transform(UNROLL, 0, 0, choice).chosen["max_trips"])
    return unroll_pairs(closed, program, max_trips)


def has_pairs(program: Program) -> bool:
    """Whether a program has loops that are worth unrolling where stacks are copied."""
    return not has_remat(program) and any(_pairs(program, None, MAX_TRIPS))


def unroll_pairs(closed: Any, program: Program, max_trips: int) -> Any:
    """Retrace a function with its pairs of loops of `max_trips` or fewer unrolled."""
    loops = {id(each.eqn) for each in _pairs(program, closed, max_trips)}
    jaxpr = open_jaxpr(closed)
    count, slices = len(jaxpr.invars), ArraySlices()

    def run(*arrays: Any) -> list[Any]:
        found = evaluate(jaxpr, arrays[count:], arrays[:count], instead)
        return [array_of(x) for x in found]

    def instead(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if id(eqn) in loops:
            return run_trips(eqn, operands, instead, slices)
        if is_plain_call(eqn):
            return inline_call(eqn, operands, instead)
        eqn = with_bodies(eqn, rewritten)
        return bind_eqn(eqn, [array_of(x) for x in operands], eqn.params)

    def rewritten(body: Any) -> Any:
        if loops.isdisjoint(map(id, inner_equations(body))):
            return body
        inner, consts = open_jaxpr(body), jaxpr_consts(body)
        return rebuild_jaxpr(
            lambda *xs: [*map(array_of, evaluate(inner, consts, xs, instead))], body
        )

    return retraced(closed, run)


def _pairs(program: Program, closed: Any, max_trips: int) -> Iterator[FlatOp]:
    """Yield the scans that stack what another slices, and those others.

    Args:
      program: the program; `closed`: its jaxpr, or None for ops without equations.
      max_trips: of the longest loop.
    """
    flat = flatten(program, closed)

    def may_be(each: FlatOp) -> bool:
        return (
            each.is_scan
            and 1 < each.call.trip_count <= max_trips
            and flat.can_change(each)
        )

    def of_region(region: FlatRegion) -> Iterator[FlatOp]:
        loops = [each for each in region.ops if may_be(each)]
        maker = {v: each for each in loops for v in each.call.stacked(each.results)}
        found = dict.fromkeys(
            loop
            for each in loops
            for value in each.call.sliced(each.operands)
            if value in maker
            for loop in (maker[value], each)
        )
        yield from found
        for each in region.ops:
            for inner in () if each in found else each.regions:
                yield from of_region(inner)

    yield from of_region(flat.top)


def _choices(traced: Traced, limits: ChoiceLimits) -> Iterator[Transform]:
    """Yield the pass that writes out all pairs of loops of at most `MAX_TRIPS`."""
    if has_pairs(traced.program):
        yield chosen(UNROLL, {"max_trips": MAX_TRIPS})


PASS = ProgramPass(
    UNROLL,
    unrolled,
    _choices,
    Trial(
        TrialKind.WHILE_BETTER,
        lambda choice: "unrolled",
        "loops",
        "unrolled",
        Gain.STACK_COPIES,
    ),
)
