"""A plan of several stages that are one program: an axis of its mesh."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.errors import InfeasiblePlanError, StageError
from rhino_jax.plan.plan import Plan
from rhino_jax.plan.records import Variant
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.planning.search import Search
from rhino_jax.planning.staging.counts import counts_of, rows_of
from rhino_jax.planning.staging.one_program.again import SolvedInOne
from rhino_jax.planning.staging.one_program.recomputed import (
    BRIEF,
    Recompute,
    Tried,
)
from rhino_jax.planning.staging.one_program.stage import StageSearch
from rhino_jax.transform.microbatch.choice import Choice
from rhino_jax.units import format_bytes


def plan_in_one_program(
    search: Search,
    places: Sequence[int],
    microbatches: int | str,
    per_microbatch: tuple[str, ...] = (),
    *,
    may_recompute: bool = False,
) -> Plan:
    """The plan of a step whose layers are spread over an axis of the mesh.

    Args:
      search: of the step as its user wrote it.
      places: of every stage along the axis.
      microbatches: how many; "auto": the best of a few counts.
      per_microbatch: where sums over the batch are those of a micro-batch.
      may_recompute: whether what loops make again is to be chosen.
    Raises:
      StageError, MicrobatchError, InfeasiblePlanError, PinError.
    """
    stages = len(places)
    if {*places} != {1}:
        raise StageError(
            "stages of one program have equal groups of devices, each one place of the"
            f" mesh along `{STAGE_AXIS}`.",
            where="`stages=`",
            numbers=f"{' + '.join(map(str, places))} places",
            fix=f"take stages={stages} and a mesh with {STAGE_AXIS}={stages}, or"
            " another schedule, as schedule='1f1b'.",
        )
    started = time.monotonic()
    stage = StageSearch(search, stages, per_microbatch)
    tried: list[Tried] = []
    best: list[Tried] = []
    for counts in _counts(stage, microbatches):
        for count in counts:
            recompute = Recompute(stage, count)
            # What is best made again hardly depends on how many there are.
            best.append(recompute.best(best[:1], is_free=may_recompute and not best))
            tried += recompute.tried
        if any(t.found.fits for t in best):
            break

    def step_s(of: Tried) -> float:
        return SolvedInOne(stage, of.search, of.found).whole.step_s(of.found)

    fastest = min(best, key=lambda t: (step_s(t), t.peak_bytes))
    if not fastest.found.fits:
        raise _nothing_fits(stage, tried)
    found = fastest.found
    if search.request.level != BRIEF:
        found = fastest.search.again(found)
    plan = SolvedInOne(stage, fastest.search, found).plan()
    report = replace(plan.search, seconds=time.monotonic() - started)
    variants = tuple(
        Variant(
            t.name,
            step_s(t),
            t.peak_bytes,
            is_chosen=t is fastest,
        )
        for t in tried
    )
    return replace(plan, search=report, variants=variants if len(variants) > 1 else ())


def _counts(stage: StageSearch, microbatches: int | str) -> list[list[int]]:
    """Numbers of micro-batches to be compared; see `counts_of`."""
    if isinstance(microbatches, int):
        return [[microbatches]]
    traced, stages = stage.search.running, stage.stages
    program, places = traced.program, stage.per_microbatch
    most_loops = Choice(2).most_loops  # as micro-batches on one mesh
    rows = rows_of(traced.closed_jaxpr, program, places, most_loops)
    counts = [*counts_of(rows, stages, stages)]
    if not counts:
        raise StageError(
            f"no number of micro-batches is a multiple of {stages} stages, which share"
            " what is in no layer.",
            where="`stages=`",
            numbers=f"a batch of {rows} rows",
            fix=f"take a batch of a multiple of {stages} rows, or another schedule.",
        )
    return counts


def _nothing_fits(stage: StageSearch, tried: Sequence[Tried]) -> InfeasiblePlanError:
    """The error of the variant that comes nearest to the budget."""
    nearest = min(tried, key=lambda t: t.peak_bytes)
    others = ", ".join(f"{t.name} {format_bytes(t.peak_bytes)}" for t in tried)
    try:
        nearest.found.plan()
    except InfeasiblePlanError as error:
        return InfeasiblePlanError(
            f"in one program of {stage.stages} stages nothing fits: {error.what}",
            where=error.where,
            numbers=f"{error.numbers}; smallest peaks: {others}",
            fix=error.fix,
        )
    raise AssertionError("a variant that does not fit has a plan")
