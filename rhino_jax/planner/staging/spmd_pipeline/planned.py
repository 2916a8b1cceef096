"""The plan of an SPMD pipeline: its stages are an axis of the mesh."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rhino_jax.errors import InfeasiblePlanError, StageError
from rhino_jax.passes.microbatch.choice import MicrobatchChoice
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Variant
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.planner.staging.counts import counts_of, rows_of
from rhino_jax.planner.staging.enough import NotFaster
from rhino_jax.planner.staging.spmd_pipeline.again import SolvedInOne
from rhino_jax.planner.staging.spmd_pipeline.recomputed import (
    BRIEF,
    WORTH,
    Recompute,
    RematCandidate,
)
from rhino_jax.planner.staging.spmd_pipeline.stage import StageSearch
from rhino_jax.planner.variant_search import Search
from rhino_jax.units import format_bytes


@dataclass(frozen=True, slots=True)
class StageBaseline:
    """The plan that an SPMD pipeline has to beat.

    Attributes:
      enough_s: seconds that a step has to be shorter than.
      may_do: whether a number of micro-batches may be fast enough.
    """

    enough_s: float = math.inf
    may_do: Callable[[int], bool] = lambda count: True


EVERY = StageBaseline()
"""No plan to beat."""


def plan_in_one_program(
    search: Search,
    places: Sequence[int],
    microbatches: int | str,
    per_microbatch: tuple[str, ...] = (),
    *,
    may_recompute: bool = False,
    asked: StageBaseline = EVERY,
) -> PlanData:
    """Return the plan of a step whose layers are sharded over the stage axis.

    Args:
      search: the search of the user's step.
      places: number of places of each stage along the stage axis.
      microbatches: the number of micro-batches; "auto": the best of a few.
      per_microbatch: places where sums over the batch are taken over each micro-batch.
      may_recompute: whether the planner may choose the residuals of loops.
      asked: the plan that it has to beat.
    Raises:
      StageError, MicrobatchError, InfeasiblePlanError, PinError.
      NotFaster: it fits, and is not fast enough.
    """
    stages = len(places)
    if {*places} != {1}:
        raise StageError(
            "stages of one program have equal groups of devices, each one place of the"
            f" mesh along `{STAGE_AXIS}`.",
            where="`stages=`",
            numbers=f"{' + '.join(map(str, places))} places",
            fix=f"take stages={sum(places)}, all of one place, or another schedule, as"
            " schedule='1f1b'.",
        )
    started = time.monotonic()
    stage = StageSearch(search, stages, per_microbatch)
    best, tried = _planned(stage, microbatches, may_recompute, asked)
    if not best:
        raise NotFaster(math.inf)
    fastest = min(best, key=lambda t: (_step_s(stage, t), t.peak_bytes))
    if not fastest.found.fits:
        raise _nothing_fits(stage, tried)
    found = fastest.found
    if _step_s(stage, fastest) * WORTH >= asked.enough_s:
        raise NotFaster(_step_s(stage, fastest), fastest.count)
    if search.request.level != BRIEF:
        found = fastest.search.again(found)
    plan = SolvedInOne(stage, fastest.search, found).plan()
    if plan.predicted.step_time_s >= asked.enough_s:
        raise NotFaster(plan.predicted.step_time_s, fastest.count)
    report = replace(plan.search, seconds=time.monotonic() - started)
    variants = tuple(
        Variant(
            t.name,
            _step_s(stage, t),
            t.peak_bytes,
            is_chosen=t is fastest,
            is_brief=t is not fastest,
        )
        for t in tried
    )
    return replace(plan, search=report, variants=variants if len(variants) > 1 else ())


def _planned(
    stage: StageSearch,
    microbatches: int | str,
    may_recompute: bool,
    asked: StageBaseline,
) -> tuple[list[RematCandidate], list[RematCandidate]]:
    """Return the best variant of every number of micro-batches, and all variants."""
    tried: list[RematCandidate] = []
    best: list[RematCandidate] = []

    def may_do(count: int) -> bool:
        """Whether `count` micro-batches may be fast enough: more than were tried only
        have fewer idle ticks."""
        if not asked.may_do(count):
            return False
        idle, fit = stage.stages - 1, [t for t in best if t.found.fits]
        return not fit or any(
            _step_s(stage, t) * (1 + idle / count) / (1 + idle / t.count)
            < asked.enough_s
            for t in fit
        )

    for counts in _counts(stage, microbatches):
        for count in filter(may_do, counts):
            recompute = Recompute(stage, count)
            # The best remat hardly depends on the number of micro-batches.
            best.append(recompute.best(best[:1], is_free=may_recompute and not best))
            tried += recompute.tried
        if any(t.found.fits for t in best):
            break
    return best, tried


def _step_s(stage: StageSearch, of: RematCandidate) -> float:
    """Return the step of all stages in seconds; infinite where it does not fit."""
    return SolvedInOne(stage, of.search, of.found).whole.step_s(of.found)


def _counts(stage: StageSearch, microbatches: int | str) -> list[list[int]]:
    """Return the candidate numbers of micro-batches; see `counts_of`."""
    if isinstance(microbatches, int):
        return [[microbatches]]
    traced, stages = stage.search.running, stage.stages
    program, places = traced.program, stage.per_microbatch
    most_loops = MicrobatchChoice(2).most_loops  # As for micro-batches on one mesh.
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


def _nothing_fits(
    stage: StageSearch, tried: Sequence[RematCandidate]
) -> InfeasiblePlanError:
    """Return the error of the variant that comes nearest to the budget."""
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
