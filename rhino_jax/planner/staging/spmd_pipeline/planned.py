"""The plan of an SPMD pipeline: its stages are an axis of the mesh."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rhino_jax.errors import StageError
from rhino_jax.ir.transform import num_microbatches
from rhino_jax.passes.microbatch.choice import MicrobatchChoice
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.planner.staging.counts import counts_of, rows_of
from rhino_jax.planner.staging.enough import NotFaster
from rhino_jax.planner.staging.spmd_pipeline.again import SolvedInOne
from rhino_jax.planner.staging.spmd_pipeline.recomputed import Recompute
from rhino_jax.planner.staging.spmd_pipeline.stage import StageSearch
from rhino_jax.planner.variant_search import (
    NEAR,
    Search,
    VariantCandidate,
    nothing_fits,
)


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
        intro = f"in one program of {stages} stages nothing fits: "
        raise nothing_fits([*map(_named, tried)], intro)
    found, count = fastest.found, _count(fastest)
    if _step_s(stage, fastest) * (1 - NEAR) >= asked.enough_s:
        raise NotFaster(_step_s(stage, fastest), count)
    if search.request.level != "fast":
        found = fastest.search.again(found)
    plan = SolvedInOne(stage, fastest.search, found).plan()
    if plan.predicted.step_time_s >= asked.enough_s:
        raise NotFaster(plan.predicted.step_time_s, count)
    report = replace(plan.search, seconds=time.monotonic() - started)
    variants = tuple(
        _named(t).record(
            is_chosen=t is fastest,
            is_brief=t is not fastest,
            step_s=_step_s(stage, t),
        )
        for t in tried
    )
    return replace(plan, search=report, variants=variants if len(variants) > 1 else ())


def _planned(
    stage: StageSearch,
    microbatches: int | str,
    may_recompute: bool,
    asked: StageBaseline,
) -> tuple[list[VariantCandidate], list[VariantCandidate]]:
    """Return the best variant of every number of micro-batches, and all variants."""
    tried: list[VariantCandidate] = []
    best: list[VariantCandidate] = []

    def may_do(count: int) -> bool:
        """Whether `count` micro-batches may be fast enough: more than were tried only
        have fewer idle ticks."""
        if not asked.may_do(count):
            return False
        idle, fit = stage.stages - 1, [t for t in best if t.found.fits]
        return not fit or any(
            _step_s(stage, t) * (1 + idle / count) / (1 + idle / _count(t))
            < asked.enough_s
            for t in fit
        )

    for counts in _counts(stage, microbatches):
        for count in filter(may_do, counts):
            recompute = Recompute(stage, count)
            # The best remat hardly depends on the number of micro-batches.
            best.append(recompute.best(best[:1], may_recompute=may_recompute))
            tried += recompute.variants.tried
        if any(t.found.fits for t in best):
            break
    return best, tried


def _count(of: VariantCandidate) -> int:
    return num_microbatches(of.search.transforms)


def _named(of: VariantCandidate) -> VariantCandidate:
    """Return a variant with its number of micro-batches in its name."""
    count = f"{_count(of)} micro-batches"
    return replace(of, name=f"{count}, {of.name}" if of.done else count)


def _step_s(stage: StageSearch, of: VariantCandidate) -> float:
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
