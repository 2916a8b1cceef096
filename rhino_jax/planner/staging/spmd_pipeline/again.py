"""The origin of an SPMD pipeline's plan, to explain it and to plan it again."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec

from rhino_jax.explain.explaining import explain
from rhino_jax.explain.place import PlacedValues
from rhino_jax.explain.why import Why
from rhino_jax.ir.spec import Spec
from rhino_jax.ir.transform import Transform
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.records import Progress
from rhino_jax.planner.staging.spmd_pipeline.stage import StageSearch
from rhino_jax.planner.staging.spmd_pipeline.whole import WholePipeline
from rhino_jax.planner.variant_search import Search, tell_nobody


ONLY_STACKS = "over the stages of one program only stacks of layers lie, by dim 0"


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

    def why(self, plan: PlanData, key: str, asked: Any, report: Progress) -> Why:
        """See `PlanData.why` and `PlanData.why_not`."""
        request = _now(self.search).request
        return explain(self.found, request, plan, key, asked, report, _View(self.whole))

    @property
    def _done(self) -> tuple[Transform, ...]:
        """The plan's passes, without those that the search of its step starts with."""
        before = len(self.stage.search.transforms)
        return self.search.transforms[before:]


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """Map one stage's values to those of the whole step (`explain.explaining.View`)."""

    of: WholePipeline

    def sent_s(self, found: SearchResult) -> float:
        """Return the seconds of transfers between stages."""
        step_s = self.of.step_s(found)
        return step_s - found.step_s if math.isfinite(step_s) else 0.0

    def shape(self, place: PlacedValues) -> tuple[int, ...]:
        """Return the shape of a value in the whole step."""
        if not self._is_stack(place):
            return place.shape
        return place.shape[0] * self.of.stages, *place.shape[1:]

    def shown(self, place: PlacedValues, spec: Spec) -> Spec:
        """Return the spec of a value in the whole step."""
        if not self._is_stack(place):
            return spec
        return (self.of.axis, *spec[0]), *spec[1:]

    def refused(self, place: PlacedValues, asked: Any) -> str:
        """Return why a value of the whole step cannot have a spec; empty: it can."""
        if type(asked) is int:
            return "stages of one program have equal parts of all layers"
        if not isinstance(asked, PartitionSpec):
            return ""
        over = [i for i, d in enumerate(asked) if STAGE_AXIS in (d, *_listed(d))]
        return "" if over in ([], [0] if self._is_stack(place) else []) else ONLY_STACKS

    def _is_stack(self, place: PlacedValues) -> bool:
        """Whether a stage has a part of everything at the place."""
        whole, own = self.of.search.traced.program, self.of.of_stage
        ends = [(whole.inputs[i].value, own.inputs[i].value) for i in place.inputs]
        ends += [(whole.outputs[i].value, own.outputs[i].value) for i in place.outputs]
        are_parts = [whole.values[a].shape != own.values[b].shape for a, b in ends]
        return bool(ends) and not place.values and all(are_parts)


def _listed(dim: Any) -> tuple[Any, ...]:
    return dim if isinstance(dim, tuple) else ()


def _now(search: Search) -> Search:
    """Return the search with its time limit counted from now."""
    limit = search.request.time_limit_s or math.inf
    return search.asking(deadline=time.monotonic() + limit)
