"""The origin of an SPMD pipeline's plan, to plan it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rhino_jax.ir.transform import Transform
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.records import Progress
from rhino_jax.planner.staging.spmd_pipeline.stage import StageSearch
from rhino_jax.planner.staging.spmd_pipeline.whole import WholePipeline
from rhino_jax.planner.variant_search import Search, tell_nobody


@dataclass(frozen=True, slots=True, eq=False)
class SolvedInOne:
    """The search that gave the plan of an SPMD pipeline.

    Attributes:
      stage: the search of the whole step.
      search, found: the search of one stage's program, with the plan's passes, and its
        result.
    """

    stage: StageSearch
    search: Search
    found: SearchResult

    @classmethod
    def again(
        cls, search: Search, stages: int, done: Sequence[Transform]
    ) -> SolvedInOne:
        """Solve the problem of a plan again that is not cached.

        Args:
          search: the search of the whole step, on the plan's mesh.
          stages: the number of stages.
          done: the plan's passes, including those of micro-batches and stages.
        """
        stage = StageSearch(search, stages)
        of_stage = stage.of_step(done)
        return cls(stage, of_stage, of_stage.find()).alone()

    def alone(self) -> SolvedInOne:
        """Return the search limited to the best mesh, without progress reports."""
        found = replace(self.found, solved=self.found.solved[:1])
        axes = self.stage.whole_axes(found.mesh_axes)

        def quiet(search: Search, meshes: list[Any]) -> Search:
            search = search.asking(watch=None)
            return replace(search, meshes=meshes, report=tell_nobody)

        stage = replace(self.stage, search=quiet(self.stage.search, [axes]))
        return SolvedInOne(stage, quiet(self.search, [found.mesh_axes]), found)

    @property
    def whole(self) -> WholePipeline:
        """The step from the plan of one stage to that of all stages."""
        axes = self.stage.whole_axes(self.found.mesh_axes)
        program = self.search.running.program
        return WholePipeline(self.stage.search, program, axes, self.stage.axis)

    def plan(self) -> PlanData:
        """Return the plan of all stages, with this search as its origin.

        Raises:
          InfeasiblePlanError: nothing fits.
          PinError: a pin shards something over the stage axis that is no stack of
            layers.
        """
        return replace(self.whole.plan(self.found), origin=self.alone())

    def planned_with(
        self, search: Search, report: Progress
    ) -> tuple[PlanData, SolvedInOne] | None:
        """Plan with another search's pins and budget, and with this one's passes.

        Args:
          search: the other search of the whole step.
          report: callback for progress.
        Returns:
          The plan, and the search that gave it; None where nothing fits.
        Raises:
          PinError: an op cannot produce what is pinned.
        """
        stage = replace(self.stage, search=search)
        of_stage = stage.of_step(self._done)
        found = replace(of_stage, report=report).held(self.found)
        if not found.fits:
            return None
        solved = SolvedInOne(stage, of_stage, found)
        return solved.plan(), solved.alone()

    @property
    def _done(self) -> tuple[Transform, ...]:
        """The plan's passes, without those that the search of its step starts with."""
        before = len(self.stage.search.transforms)
        return self.search.transforms[before:]
