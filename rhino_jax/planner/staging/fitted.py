"""The plan of a cut step by one schedule, with all submeshes planned until they fit, or
planned again from a plan.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.ir.spec import Spec
from rhino_jax.passes.staged.in_slices import staged_in_slices
from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.sides import sides_of
from rhino_jax.passes.staged.stacks import Unstacked
from rhino_jax.passes.staged.staging import staged
from rhino_jax.passes.staged.step import StagedStep, ValueKey
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.schedules.searched import SEARCHED
from rhino_jax.pipeline.work import FORWARD_ONLY
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.stages import Pipeline, runs_of
from rhino_jax.planner.search.records import Request
from rhino_jax.planner.staging import schedules
from rhino_jax.planner.staging.assembled import UNKNOWN, PlannedStages
from rhino_jax.planner.staging.cuts import CutStep
from rhino_jax.planner.staging.groups import GroupLayouts, GroupsSearch
from rhino_jax.planner.staging.planned import PlannedGroup, Room
from rhino_jax.planner.staging.shapes import GroupMeshes
from rhino_jax.planner.variant_search import Search
from rhino_jax.runtime.tasks.executable import step_of, unstacked_of


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """All submeshes of a plan, planned.

    Attributes:
      run: the planned submeshes and their pipeline; None if one does not fit.
      cannot: which submesh does not fit; empty if all do.
    """

    run: PlannedStages | None
    cannot: str = ""

    @property
    def groups(self) -> tuple[PlannedGroup, ...]:
        """The planned submeshes; empty if one does not fit."""
        return self.run.groups if self.run else ()

    @property
    def step_s(self) -> float:
        """Simulated seconds of the pipeline's step."""
        return self.run.simulation.step_time_s if self.run else math.inf

    @property
    def peaks(self) -> tuple[int, ...]:
        """Peak bytes of a device of each submesh, with its micro-batches in flight."""
        return self.run.simulation.group_peak_bytes if self.run else ()

    @property
    def sent(self) -> Mapping[tuple[int, int], float]:
        """(Source, target) submesh → seconds of a step's transfers between them."""
        sent: dict[tuple[int, int], float] = defaultdict(float)
        pipeline = self.run.pipeline if self.run else UNKNOWN
        for hop in pipeline.hops:
            a, b = sorted((pipeline.groups[hop.source], pipeline.groups[hop.target]))
            size = pipeline.micro_batches * (hop.forward_bytes + hop.backward_bytes)
            sent[a, b] += size / hop.bytes_per_s
        return sent

    @property
    def rank(self) -> tuple[float, float, float]:
        """Sort key, lowest best: the step, all stages' seconds, peak bytes."""
        took = [g.found.step_s for g in self.groups]
        return self.step_s, sum(took) if took else math.inf, max(self.peaks, default=0)


@dataclass(frozen=True, slots=True, eq=False)
class SolvedStages:
    """The problems that gave a plan of several stages.

    Attributes:
      search: the search of the user's step.
      run: the planned submeshes and their pipeline.
    """

    search: Search
    run: PlannedStages

    @property
    def of_step(self) -> Unstacked:
        """The step, with layer stacks split."""
        return self.run.of_step

    @property
    def step(self) -> StagedStep:
        """The tasks of all submeshes."""
        return self.run.step

    @property
    def groups(self) -> tuple[PlannedGroup, ...]:
        """The planned submeshes."""
        return self.run.groups

    @property
    def request(self) -> Request:
        """The options of the search, with the user's pins."""
        return self.search.request

    def laid(self) -> Laid:
        """Return the plan with its simulated times and peaks."""
        return Laid(self.run)

    def held(
        self,
        held: GroupLayouts,
        level: str,
        known: Laid | None = None,
        *,
        is_kept: bool,
    ) -> Laid:
        """Plan all submeshes again with some layouts fixed: those whose pins change are
        searched again, in the original order.

        Args:
          held: the fixed layouts.
          level: level of the search.
          known: the same plan at another level, from which the search continues.
          is_kept: whether all other values that stages send have the plan's layouts.
        Raises:
          PinError: an op cannot produce a fixed layout.
        """
        if is_kept:
            held = replace(held, handed={**self._handed(), **held.handed})
        before = known.groups if known is not None and known.groups else self.groups
        try:
            return Laid(self._run(held, level, before))
        except InfeasiblePlanError as error:
            what = error.what.partition(":")[0].rstrip(".")
            return Laid(None, f"{what}: {error.numbers.partition(';')[0]}")

    def best(self, held: GroupLayouts, level: str, known: Laid | None = None) -> Laid:
        """Return the better of two plans with layouts fixed: with all other sent values
        laid out as in the plan, and with layouts that are best for the first submesh
        that has them."""
        free = self.held(held, level, known, is_kept=False)
        if free.groups and self._handed(free.groups) == self._handed():
            return free  # Both plans are the same.
        kept = self.held(held, level, known, is_kept=True)
        return min(kept, free, key=lambda laid: laid.rank)

    @property
    def pinned_search(self) -> Search:
        """The search whose program the user's pins are resolved in."""
        return self.search

    def planned_with(self, search: Search) -> tuple[PlanData, SolvedStages] | None:
        """Plan with the pins of another search and the same stage cuts.

        Returns:
          The plan, and the problems that gave it; None where a submesh does not fit.
        Raises:
          PinError: an op cannot produce what is pinned.
        """
        started, other = time.monotonic(), replace(self, search=search)
        laid = other.best(GroupLayouts(), search.request.level)
        if laid.run is None:
            return None
        quiet = search.quiet(*search.meshes)
        found = replace(other, search=quiet, run=laid.run)
        return found.plan(started), found

    def plan(self, started: float) -> PlanData:
        """Return one plan of all submeshes, with these problems as its origin.

        Args:
          started: `time.monotonic()` when the search began.
        """
        return replace(self.run.plan(self.search, started), origin=self)

    def _handed(self, groups: Sequence[PlannedGroup] = ()) -> dict[ValueKey, Spec]:
        """Return the layouts of the values that stages send, in this plan or in that of
        other submeshes."""
        of = groups or self.groups
        return {s.key: of[s.source].specs[s.key] for s in self.step.sends}

    def _run(
        self, held: GroupLayouts, level: str, before: Sequence[PlannedGroup]
    ) -> PlannedStages:
        search, step = self.search.asking(level=level, deadline=math.inf), self.step
        limit, known = search.request.memory_budget_bytes, self.run.pipeline

        def pipeline_of(stages: PlannedStages) -> Pipeline:
            pipeline = stages.with_costs(known)
            # A searched order does not depend on the costs of tasks; nor does one that
            # transfers of offloaded values follow.
            is_known = pipeline.schedule in (SEARCHED, FORWARD_ONLY)
            if is_known or pipeline.is_offloaded:
                return pipeline
            return schedules.settle(pipeline, search.options.schedule, limit)

        return GroupsSearch(
            search=search,
            of_step=self.of_step,
            shapes=self.run.shapes,
            step_of=lambda _: step,
            pipeline_of=pipeline_of,
            held=held,
            before=before,
        ).fit(replace(self.run.room, may_recompute=False))


def solve_again(search: Search, plan: PlanData) -> SolvedStages:
    """Solve the problems of a plan again that are not cached.

    Args:
      search: the search of the user's step, on the plan's mesh.
      plan: a plan of several stages.
    """
    pipeline, shares = plan.pipeline, plan.places
    assert pipeline is not None
    choices = (x.choice for x in pipeline.remat)
    remat = StagedRemat.of(pipeline.recomputed, choices)
    of_step = unstacked_of(search.running, plan)
    step = step_of(of_step, pipeline)
    shapes = GroupMeshes.on(plan.mesh_axes, shares, {}, search.target)
    flights = (1,) * shapes.groups
    if pipeline.schedule != FORWARD_ONLY:
        flights = schedules.flights_of(schedule_of(pipeline), len(pipeline.costs))
    groups = GroupsSearch(
        search=search,
        of_step=of_step,
        shapes=shapes,
        step_of=lambda _: step,
        pipeline_of=lambda stages: stages.with_costs(pipeline),
    )
    run = groups.fit(Room(flights, (0,) * shapes.groups, remat=remat))
    return SolvedStages(search, run)


def fit_stages(cut_step: CutStep, candidate: schedules.EstimatedSchedule) -> PlanData:
    """Return the plan of a cut step by one schedule.

    Args:
      cut_step: the step, cut into stages.
      candidate: its schedule.
    Raises:
      InfeasiblePlanError: a submesh does not fit.
      ScheduleError: a searched schedule does not fit.
    """
    asked, shapes = cut_step.asked, cut_step.shapes
    search, of_step = asked.search, asked.of_step
    together, limit = of_step.together, search.request.memory_budget_bytes

    cut_into = cut_step.apart, cut_step.chosen.stages

    def step_of(remat: StagedRemat) -> StagedStep:
        if cut_step.slices:
            return staged_in_slices(
                *cut_into,
                range(shapes.groups),
                cut_step.slices,
                remat=remat,
                together=together,
            )
        return staged(
            *cut_into,
            cut_step.group_of,
            is_split=candidate.is_split,
            remat=remat,
            together=together,
        )

    may_recompute = search.options.may_recompute
    usual = f'schedule="{schedules.usual(cut_step.work)}"'
    instead = usual if may_recompute else 'recompute="auto"'
    # The search for schedules does not simulate links to hosts.
    host_bytes_per_s = search.target.device.host_bytes_per_s
    room = Room(
        candidate.in_flight,
        (0,) * shapes.groups,
        may_recompute and cut_step.has_backward,
        candidate.is_split,
        None if candidate.name == SEARCHED else host_bytes_per_s,
        instead if cut_step.has_backward else "",
    )

    def pipeline_of(stages: PlannedStages) -> Pipeline:
        by_stage = tuple(group.remat for group in stages.groups)
        pipeline = Pipeline(
            micro_batches=stages.step.micro_batches,
            schedule=candidate.name,
            runs=runs_of(cut_step.chosen.stages),
            costs=(),
            hops=(),
            per_microbatch=asked.places,
            group_of=stages.step.chunks if cut_step.slices else cut_step.group_of,
            is_split=candidate.is_split,
            recomputed=tuple(sorted(stages.room.remat.chunks)),
            remat=by_stage if any(x.choice for x in by_stage) else (),
            slices=cut_step.slices,
            unrolled_trips=of_step.unrolled_trips,
        )
        pipeline = stages.with_costs(pipeline)
        if pipeline.is_offloaded:
            # Offloaded values are transferred in the order of this schedule.
            return replace(pipeline, host_bytes_per_s=host_bytes_per_s or 0.0)
        if not cut_step.has_backward:
            return pipeline
        return schedules.settle(pipeline, asked.schedule, limit)

    run = GroupsSearch(
        search=search,
        of_step=of_step,
        shapes=shapes,
        step_of=step_of,
        pipeline_of=pipeline_of,
        finds=asked.finds,
        # Values of sequence slices are not chosen one by one.
        sides=None if cut_step.slices else cache(partial(sides_of, cut_step.apart)),
    ).fit(room)
    # Later questions report no progress, and are not dumped as passes of this search.
    return SolvedStages(search.quiet(*search.meshes), run).plan(asked.started)
