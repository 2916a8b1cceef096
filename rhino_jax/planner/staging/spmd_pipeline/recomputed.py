"""Choice of the residuals that the loops of an SPMD pipeline's stage save or recompute.

The layers' residuals are live for all micro-batches, and copied to and from their
stacks on every tick: recomputing them may take less time, even with memory to spare.
Passes are chosen on the user's step, before it is split into micro-batches and stages,
and then planned on one stage's program.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rhino_jax.ir.transform import RECOMPUTE, Transform
from rhino_jax.passes.remat.unremat import has_remat
from rhino_jax.planner.remat import SECONDS, SHARES, with_room
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.remat.choice import Chosen
from rhino_jax.planner.search.remat.stacked import Stacking
from rhino_jax.planner.staging.spmd_pipeline.stage import StageSearch
from rhino_jax.planner.variant_search import Search
from rhino_jax.planner.variants import MIN_GAIN, WITHOUT_REMAT


BRIEF = "fast"
"""Level of the searches that are compared."""

WORTH = 0.99
"""Share of the shortest step so far below which a choice's estimate must be for it to
be planned. Brief plans take about a second and may be off by a percent
(`planner.variants.NEAR`)."""


@dataclass(frozen=True, slots=True, eq=False)
class RematCandidate:
    """A variant of one stage's program.

    Attributes:
      count: the number of micro-batches.
      what: the passes applied to the step before, for messages; "" for none.
      done: these passes.
      search, found: the search of a stage, and its result.
    """

    count: int
    what: str
    done: tuple[Transform, ...]
    search: Search
    found: SearchResult

    @property
    def name(self) -> str:
        return ", ".join([f"{self.count} micro-batches", *filter(None, [self.what])])

    @property
    def peak_bytes(self) -> int:
        solution = self.found.solved[0].solution
        return int(solution.peak if self.found.fits else solution.smallest_peak)


@dataclass(slots=True, eq=False)
class Recompute:
    """Search remat variants in some number of micro-batches.

    Attributes:
      stage: the search of one stage's program.
      count: the number of micro-batches.
      tried: all variants planned so far, the user's step first.
    """

    stage: StageSearch
    count: int
    tried: list[RematCandidate] = field(default_factory=list)

    def best(self, known: Sequence[RematCandidate], *, is_free: bool) -> RematCandidate:
        """Return the fastest variant that fits, or the user's step if hardly slower.

        Args:
          known: the best variant of another number of micro-batches, whose passes are
            taken here.
          is_free: whether the planner may choose what to recompute.
        """
        for other in known:
            return self._plan(other.what, other.done)
        written = self._plan("", ())
        if is_free:
            self._choose(written)
        best = min(self.tried, key=lambda t: (t.found.step_s, t.peak_bytes))
        is_faster = best.found.step_s < (1 - MIN_GAIN) * written.found.step_s
        return best if is_faster or not written.found.fits else written

    def _plan(self, what: str, done: Sequence[Transform]) -> RematCandidate:
        search = self.stage.of_stage(self.count, done)
        if self.tried and self.tried[0].found.fits:
            search = search.on(self.tried[0].found.mesh_axes)
        found = search.asking(level=BRIEF).find()
        self.tried.append(RematCandidate(self.count, what, (*done,), search, found))
        return self.tried[-1]

    def _choose(self, written: RematCandidate) -> None:
        """Plan variants that may be better than the user's step."""
        all_kept, before = written, tuple[Transform, ...]()
        if has_remat(self.stage.search.traced.program):
            before = (WITHOUT_REMAT,)
            all_kept = self._plan("no remat", before)
        search = self.stage.of_step(before).on(written.found.mesh_axes)
        brief = search.asking(level=BRIEF)
        wide = next(with_room(brief, brief.find()), None)
        if wide is None:
            return
        stacking = Stacking.of(wide.solved[0])
        kept, least = stacking.all_kept(), stacking.nothing_saved()
        if kept is None or least is None or not least.choice.recompute:
            return
        again = self._plan(least.name, (*before, _as_pass(least)))
        some = self._some(stacking, (kept, all_kept), (least, again))
        if some is not None and some.choice != least.choice:
            self._plan(some.name, (*before, _as_pass(some)))

    def _some(
        self,
        stacking: Stacking,
        kept: tuple[Chosen, RematCandidate],
        least: tuple[Chosen, RematCandidate],
    ) -> Chosen | None:
        """Return the cheapest choice of residuals, if that may be better than the plans
        so far: two plans give the cost of a stacked byte.

        Args:
          stacking: the choices.
          kept, least: the choice and the plan with all residuals saved, and with none
            saved.
        """
        if not least[1].found.fits or time.monotonic() > self._deadline:
            return None
        # A stage runs its part of the layers, on ticks without a micro-batch too.
        stages = self.stage.stages
        share = (self.count + stages - 1) / (self.count * stages)
        more = stacking.stacked_bytes(kept[0]) - stacking.stacked_bytes(least[0])
        saved_s = _free_s(kept[1]) - least[1].found.step_s
        remade_s = least[0].answer.added_s - kept[0].answer.added_s
        per_byte_s = (saved_s / share + remade_s) / more if more else 0.0
        if per_byte_s <= 0:
            return None
        budget = SHARES[0] * self.stage.search.request.memory_budget_bytes
        room = (budget - least[1].peak_bytes) / share
        limit = max(0.0, least[0].answer.peak_bytes + room)
        some = stacking.cheapest(per_byte_s, min(limit, float(1 << 62)), SECONDS)
        if some is None or not some.choice.recompute:
            return None
        copied_s = stacking.stacked_bytes(least[0]) * per_byte_s
        more_s = some.answer.added_s - copied_s - least[0].answer.added_s
        fastest = min(t.found.step_s for t in self.tried)
        is_better = least[1].found.step_s + share * more_s < WORTH * fastest
        return some if is_better else None

    @property
    def _deadline(self) -> float:
        return self.stage.search.request.deadline


def _free_s(tried: RematCandidate) -> float:
    """Return the step of a variant in seconds, were memory no limit."""
    if tried.found.fits:
        return tried.found.step_s
    return (
        tried.search.asking(level=BRIEF, memory_budget_bytes=float(1 << 62))
        .again(tried.found)
        .step_s
    )


def _as_pass(chosen: Chosen) -> Transform:
    return Transform(RECOMPUTE, 0, 0, str(chosen.choice))
