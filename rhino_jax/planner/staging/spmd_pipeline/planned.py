"""The plan of an SPMD pipeline, with the number of micro-batches and the residuals that
its loops save or recompute.

The layers' residuals are live for all micro-batches, and copied to and from their
stacks on every tick: recomputing them may take less time, even with memory to spare.
Passes are chosen on the user's step, before it is split into micro-batches and stages,
and then planned on one stage's program.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rhino_jax.errors import StageError
from rhino_jax.ir.transform import UN_REMAT, num_microbatches
from rhino_jax.passes.microbatch.cut import MicrobatchChoice
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.planner.decision import NotFaster
from rhino_jax.planner.remat import EFFORT, SHARES, as_pass, with_room
from rhino_jax.planner.search.remat.candidates import candidates_of
from rhino_jax.planner.search.remat.choice import NOTHING_SAVED, ask, variants
from rhino_jax.planner.search.remat.rows import Chosen, RematQuestion
from rhino_jax.planner.staging.cuts import counts_of, rows_of
from rhino_jax.planner.staging.spmd_pipeline.whole import SolvedInOne, StageSearch
from rhino_jax.planner.variant_search import (
    NEAR,
    Search,
    VariantCandidate,
    Variants,
    nothing_fits,
)


@dataclass(slots=True, eq=False)
class Recompute:
    """Search remat variants in some number of micro-batches.

    Attributes:
      stage: the search of one stage's program.
      count: the number of micro-batches.
      variants: all variants planned so far, the user's step first.
    """

    stage: StageSearch
    count: int
    variants: Variants = field(init=False)

    def __post_init__(self) -> None:
        after = partial(self.stage.of_stage, self.count)
        self.variants = Variants(self.stage.search, after=after)

    def best(self, known: Sequence[VariantCandidate]) -> VariantCandidate:
        """Return the fastest variant that fits, or the user's step if hardly slower.

        Args:
          known: the best variant of another number of micro-batches, whose passes are
            taken here.
        """
        name, done = (known[0].name, known[0].done) if known else ("baseline", ())
        self.variants.plan(name, done)
        (written,) = self.variants.tried
        if self.stage.search.options.may_recompute and not known:
            if written.found.fits:
                self.variants.meshes = [written.found.mesh_axes]
            self._choose(written)
        return self.variants.fastest()

    def _choose(self, written: VariantCandidate) -> None:
        """Plan variants that may be better than the user's step."""
        all_kept, plan = written, self.variants.plan
        before = tuple(self.stage.search.choices(UN_REMAT))
        if before:
            all_kept = plan("no remat", before) or written
        search = self.stage.of_step(before).on(written.found.mesh_axes)
        brief = search.asking(level="fast")
        wide = next(with_room(brief, brief.find()), None)
        if wide is None:
            return
        asked = candidates_of(wide.solved[0], may_offload=False).stacked_at(0.0)
        least = next(variants(asked, NOTHING_SAVED), None)
        if least is None or not least.choice.recompute:
            return
        again = plan(least.name, (*before, as_pass(least)))
        if again is None:
            return
        some = self._some(asked, all_kept, (least, again))
        if some is not None:
            plan(some.name, (*before, as_pass(some)))

    def _some(
        self,
        asked: RematQuestion,
        kept: VariantCandidate,
        least: tuple[Chosen, VariantCandidate],
    ) -> Chosen | None:
        """Return the cheapest choice of residuals, if that may be better than the plans
        so far: two plans give the cost of a stacked byte.

        Args:
          asked: the remat problem, in which stacking costs no time.
          kept: the plan with all residuals saved.
          least: the choice and the plan with none saved.
        """
        if not least[1].found.fits:
            return None
        # A stage runs its part of the layers, on ticks without a micro-batch too.
        stages = self.stage.stages
        share = (self.count + stages - 1) / (self.count * stages)
        saved, least_bytes = asked.all_saved, asked.stacked_bytes(least[0].answer)
        more = asked.stacked_bytes(saved) - least_bytes
        saved_s = _free_s(kept) - least[1].step_s
        recomputed_s = least[0].answer.added_s - saved.added_s
        per_byte_s = (saved_s / share + recomputed_s) / more if more else 0.0
        if per_byte_s <= 0:
            return None
        budget = SHARES[0] * self.stage.search.request.memory_budget_bytes
        room = (budget - least[1].peak_bytes) / share
        limit = max(0.0, least[0].answer.peak_bytes + room)
        found = ask(asked.stacked_at(per_byte_s), limit, effort=EFFORT)
        some = next((c for c in found if c.choice != least[0].choice), None)
        if some is None:
            return None
        copied_s = least_bytes * per_byte_s
        more_s = some.answer.added_s - copied_s - least[0].answer.added_s
        may_win = self.variants.may_win(least[1].step_s + share * more_s)
        return some if may_win else None


def _free_s(tried: VariantCandidate) -> float:
    """Return the step of a variant in seconds, were memory no limit."""
    if tried.found.fits:
        return tried.step_s
    return (
        tried.search.asking(level="fast", memory_budget_bytes=float(1 << 62))
        .again(tried.found)
        .step_s
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
    search: Search, places: Sequence[int], asked: StageBaseline = EVERY
) -> PlanData:
    """Return the plan of a step whose layers are sharded over the stage axis.

    Args:
      search: the search of the user's step.
      places: number of places of each stage along the stage axis.
      asked: the plan that it has to beat.
    Raises:
      StageError, MicrobatchError, InfeasiblePlanError, PinError.
      NotFaster: it fits, and is not fast enough.
    """
    stages = len(places)
    if {*places} != {1}:
        raise StageError(
            "stages of one program have equal numbers of devices, each one place of the"
            f" mesh along `{STAGE_AXIS}`.",
            where="`stages=`",
            numbers=f"{' + '.join(map(str, places))} places",
            fix=f"take stages={sum(places)}, all of one place, or another schedule, as"
            " schedule='1f1b'.",
        )
    started = time.monotonic()
    stage = StageSearch(search, stages)
    best, tried = _planned(stage, asked)
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
    stage: StageSearch, asked: StageBaseline
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

    for counts in _counts(stage):
        for count in filter(may_do, counts):
            recompute = Recompute(stage, count)
            # The best remat hardly depends on the number of micro-batches.
            best.append(recompute.best(best[:1]))
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


def _counts(stage: StageSearch) -> list[list[int]]:
    """Return the candidate numbers of micro-batches; see `counts_of`."""
    options, stages = stage.search.options, stage.stages
    if isinstance(options.microbatches, int):
        return [[options.microbatches]]
    traced = stage.search.running
    program, places = traced.program, options.per_microbatch
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
