"""Plans of one row: one for each method, made in one process from one trace."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.bench.methods import ShardingMethod
from rhino_jax.bench.records import CellOutcome, Measure
from rhino_jax.bench.suite import BenchRow, model_of
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.frontend.call import split_call
from rhino_jax.frontend.parameters import read_parameters
from rhino_jax.frontend.trace import Traced, trace_call
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.layout import mesh_axis_names, mesh_shapes
from rhino_jax.hardware.target import Target
from rhino_jax.models.workload import Workload
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.cuts import best_cut
from rhino_jax.planner.experts import in_parts
from rhino_jax.planner.search.driver import (
    find,
    make_candidates,
    make_recipe_plans,
    plans_of_recipes,
)
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import PlanCandidate, Request
from rhino_jax.planner.variant_search import Search
from rhino_jax.runtime.sharded import with_trees
from rhino_jax.solver.least_peak import smallest_peak
from rhino_jax.units import parse_bytes
from rhino_jax.utils.codec import to_json
from rhino_jax.verify.refine import Judge, refine


MeshAxes = tuple[tuple[str, int], ...]
_WHAT = "`bench`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan of one method, or why there is none.

    Attributes:
      method: the method.
      plan: the plan, as `rhino.plan` returns it, without a mesh; None if there is none.
      plan_s: seconds of planning, tracing excluded.
      status: "ok", "no plan" or "not allowed" (see `records.STATUSES`).
      error: why there is no plan.
    """

    method: ShardingMethod
    plan: PlanData | None = None
    plan_s: float = 0.0
    status: str = "ok"
    error: str = ""

    def outcome(self) -> CellOutcome:
        """Return the outcome of planning as plain values."""
        found = CellOutcome(status=self.status, plan_s=self.plan_s, error=self.error)
        if self.plan is None:
            return found
        measure = Measure.of(self.plan.predicted, self.plan.collectives)
        return replace(
            found,
            mesh=dict(self.plan.mesh_axes),
            predicted=measure,
            candidates=tuple(map(to_json, self.plan.refined)),
        )


def workload_of(row: BenchRow) -> Workload:
    """Return the row's model, with its overrides."""
    return model_of(row.model, **dict(row.overrides))


def trace_workload(workload: Workload) -> Traced:
    """Trace the workload's step on shapes."""
    parameters = read_parameters(
        workload.step, donate_argnums=workload.donate_argnums, what=_WHAT
    )
    call = split_call(parameters, workload.abstract_args(), {}, _WHAT)
    return trace_call(parameters, call, mesh=None, what=_WHAT)


@dataclass(frozen=True, slots=True)
class Planner:
    """Planner of one traced workload on one target.

    Attributes:
      traced: the workload's step.
      target: the hardware.
      meshes: meshes to choose from; a single one if the row names it.
      budget_bytes: memory of a device.
      reserve_share: share of it that plans leave free.
    """

    traced: Traced
    target: Target
    meshes: tuple[MeshAxes, ...]
    budget_bytes: float
    reserve_share: float = 0.0

    @classmethod
    def of(cls, row: BenchRow) -> Planner:
        target = load_target(row.target)
        meshes: tuple[MeshAxes, ...] = (row.mesh,)
        if not row.mesh:
            assert target.num_devices is not None, "suites name whole topologies"
            meshes = tuple(
                tuple(zip(mesh_axis_names(target, len(shape)), shape, strict=True))
                for shape in mesh_shapes(target, target.num_devices)
            )
        traced = trace_workload(workload_of(row))
        budget_bytes = parse_bytes(row.memory) if row.memory else None
        planner = cls(traced, target, meshes, budget_bytes or target.device.hbm_bytes)
        if row.memory_share is None and row.memory_room is None:
            return replace(planner, reserve_share=target.device.reserve_share)
        best = planner._choose("best")
        free = best.predicted.peak_bytes
        if row.memory_room is None:
            return replace(planner, budget_bytes=(row.memory_share or 1) * free)
        least = planner._least_bytes(best.mesh_axes)
        budget_bytes = least + row.memory_room * max(0, free - least)
        return replace(planner, budget_bytes=budget_bytes)

    def plans(self, methods: Sequence[ShardingMethod]) -> Iterator[Planned]:
        """Yield the plans of methods that need no compiler; recipes first, all at once.

        If there are several meshes, rhino's own plans are on the best of them, and
        recipes on the mesh of rhino's fast plan.
        """
        recipes = [m for m in methods if m.is_recipe]
        if recipes:
            yield from self._recipes(recipes)
        for method in methods:
            if not method.is_recipe:
                yield self._own(method)

    def refined(self, method: ShardingMethod, judge: Judge) -> Planned:
        """Return the candidate that the judge finds fastest, as `refine=` does."""
        started = time.monotonic()

        program, request = self.traced.program, self._request("best")

        def within(budget_bytes: int) -> PlanCandidate | None:
            less = replace(request, memory_budget_bytes=budget_bytes)
            try:
                plan = find(program, self.meshes, self.target, less).plan()
            except InfeasiblePlanError:
                return None
            return PlanCandidate("less memory", plan)

        try:
            found = make_candidates(
                program, self.meshes, self.target, request, method.refine
            )
            plan = refine(found, judge, int(self.budget_bytes), within)
        except InfeasiblePlanError as error:
            return _none(method, started, error)
        return self._planned(method, plan, started)

    def _recipes(self, methods: Sequence[ShardingMethod]) -> Iterator[Planned]:
        started = time.monotonic()
        mesh, program = self.meshes[0], self.traced.program
        if len(self.meshes) > 1:
            try:
                mesh = self._choose("fast").mesh_axes
            except InfeasiblePlanError as error:
                yield from (_none(m, started, error) for m in methods)
                return
        by_density: dict[str, dict[str, PlanData | None]] = {}
        for method in methods:
            if method.density not in by_density:
                request = replace(self._request("best"), density=method.density)
                plans = make_recipe_plans(program, mesh, self.target, request)
                for own, problem in in_parts(self._search(request, mesh)):
                    plans |= plans_of_recipes(problem, self.target, own.request)
                by_density[method.density] = plans
            plans = by_density[method.density]
            plan = plans.get(method.plan)
            if plan is None:
                yield Planned(
                    method=method,
                    plan_s=time.monotonic() - started,
                    status="not allowed",
                    error=_why_not(method, plans),
                )
                continue
            yield self._planned(method, plan, started)

    def _own(self, method: ShardingMethod) -> Planned:
        started = time.monotonic()
        try:
            if method.plan == "auto":
                return self._planned(method, self._cut_in_time(), started)
            return self._planned(method, self._choose(method.plan), started)
        except InfeasiblePlanError as error:
            return _none(method, started, error)

    def _choose(self, level: str) -> PlanData:
        program, request = self.traced.program, self._request(level)
        return find(program, self.meshes, self.target, request).plan()

    def _cut_in_time(self) -> PlanData:
        """Return the plan with micro-batches and remat chosen, as `rhino.plan` does."""
        return best_cut(self._search(self._request("best"), *self.meshes))

    def _search(self, request: Request, *meshes: MeshAxes) -> Search:
        return Search(self.traced, None, [*meshes], self.target, request, {}, 0, _WHAT)

    def _least_bytes(self, mesh: MeshAxes) -> float:
        """Return the lowest peak memory found for any plan on a mesh, in bytes."""
        analysis = ProgramAnalysis.of(self.traced.program, self.target)
        # With a limit of 0 the model includes every copy, however small.
        request = replace(self._request("best"), memory_budget_bytes=0.0)
        problem = build_mesh_problem(analysis, mesh, request).model.problem
        return math.ceil(problem.peak(smallest_peak(problem)))

    def _request(self, level: str) -> Request:
        # A row's own share or room refers to predicted peaks.
        return Request(
            memory_budget_bytes=(1 - self.reserve_share) * self.budget_bytes,
            reserve_share=self.reserve_share,
            pins={},
            output_pins={},
            level=level,
        )

    def _planned(
        self, method: ShardingMethod, plan: PlanData, started: float
    ) -> Planned:
        took_s = time.monotonic() - started
        whole = with_trees(plan, self.traced, None)
        return Planned(method=method, plan=whole, plan_s=took_s)


def _none(
    method: ShardingMethod, started: float, error: InfeasiblePlanError
) -> Planned:
    took_s = time.monotonic() - started
    return Planned(method=method, plan_s=took_s, status="no plan", error=str(error))


def _why_not(method: ShardingMethod, plans: Mapping[str, PlanData | None]) -> str:
    if method.plan in plans:
        return f"the program has nothing that {method.plan} could cut."
    return f"{method.plan} needs a mesh of more axes, or experts."
