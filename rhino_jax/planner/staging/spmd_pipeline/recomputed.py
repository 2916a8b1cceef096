"""Choice of the residuals that the loops of an SPMD pipeline's stage save or recompute.

The layers' residuals are live for all micro-batches, and copied to and from their
stacks on every tick: recomputing them may take less time, even with memory to spare.
Passes are chosen on the user's step, before it is split into micro-batches and stages,
and then planned on one stage's program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from rhino_jax.ir.transform import RECOMPUTE, UN_REMAT, Transform
from rhino_jax.planner.remat import SECONDS, SHARES, with_room
from rhino_jax.planner.search.remat.choice import Chosen
from rhino_jax.planner.search.remat.stacked import Stacking
from rhino_jax.planner.staging.spmd_pipeline.stage import StageSearch
from rhino_jax.planner.variant_search import VariantCandidate, Variants


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

    def best(
        self, known: Sequence[VariantCandidate], *, may_recompute: bool
    ) -> VariantCandidate:
        """Return the fastest variant that fits, or the user's step if hardly slower.

        Args:
          known: the best variant of another number of micro-batches, whose passes are
            taken here.
          may_recompute: whether the planner may choose what to recompute.
        """
        name, done = (known[0].name, known[0].done) if known else ("baseline", ())
        self.variants.plan(name, done)
        (written,) = self.variants.tried
        if may_recompute and not known:
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
        stacking = Stacking.of(wide.solved[0])
        kept, least = stacking.all_kept(), stacking.nothing_saved()
        if kept is None or least is None or not least.choice.recompute:
            return
        again = plan(least.name, (*before, _as_pass(least)))
        if again is None:
            return
        some = self._some(stacking, (kept, all_kept), (least, again))
        if some is not None and some.choice != least.choice:
            plan(some.name, (*before, _as_pass(some)))

    def _some(
        self,
        stacking: Stacking,
        kept: tuple[Chosen, VariantCandidate],
        least: tuple[Chosen, VariantCandidate],
    ) -> Chosen | None:
        """Return the cheapest choice of residuals, if that may be better than the plans
        so far: two plans give the cost of a stacked byte.

        Args:
          stacking: the choices.
          kept, least: the choice and the plan with all residuals saved, and with none
            saved.
        """
        if not least[1].found.fits:
            return None
        # A stage runs its part of the layers, on ticks without a micro-batch too.
        stages = self.stage.stages
        share = (self.count + stages - 1) / (self.count * stages)
        more = stacking.stacked_bytes(kept[0]) - stacking.stacked_bytes(least[0])
        saved_s = _free_s(kept[1]) - least[1].step_s
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


def _as_pass(chosen: Chosen) -> Transform:
    return Transform(RECOMPUTE, 0, 0, str(chosen.choice))
