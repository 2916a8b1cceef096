"""Plans of one row: one for each method, from one trace."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.bench.methods import ShardingMethod
from rhino_jax.bench.records import Measure, Result
from rhino_jax.bench.suite import BenchRow
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.frontend.call import split_call
from rhino_jax.frontend.parameters import read_parameters
from rhino_jax.frontend.trace import Traced, trace_call
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target
from rhino_jax.models.workload import Workload
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.cuts import best_cut
from rhino_jax.planner.experts import in_parts
from rhino_jax.planner.meshes import MeshAxes, candidates
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


_WHAT = "`bench`"


class Planned(NamedTuple):
    """The plan of one method, as `rhino.plan` returns it, without a mesh.

    Attributes:
      result: outcome of planning, with the reason if there is no plan.
      plan: the plan; None if there is none.
    """

    result: Result
    plan: PlanData | None


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
    _by_density: dict[str, tuple[dict[str, PlanData | None], float]] = field(
        default_factory=dict, init=False, compare=False
    )

    @classmethod
    def of(cls, row: BenchRow) -> Planner:
        target = load_target(row.target)
        traced = trace_workload(row.make())
        meshes = [row.mesh] if row.mesh else candidates(traced, target, row.num_devices)
        budget_bytes = parse_bytes(row.memory) if row.memory else None
        all_bytes = target.device.hbm_bytes
        planner = cls(traced, target, tuple(meshes), budget_bytes or all_bytes)
        if row.memory_share is None and row.memory_room is None:
            return replace(planner, reserve_share=target.device.reserve_share)
        best = planner._choose("best")
        free = best.predicted.peak_bytes
        if row.memory_room is None:
            return replace(planner, budget_bytes=(row.memory_share or 1) * free)
        least = planner._least_bytes(best.mesh_axes)
        budget_bytes = least + row.memory_room * max(0, free - least)
        return replace(planner, budget_bytes=budget_bytes)

    def plan(self, method: ShardingMethod) -> Planned:
        """Return the plan of a method that needs no compiler.

        If there are several meshes, rhino's own plans are on the best of them, and
        recipes on the mesh of rhino's fast plan.
        """
        started = time.monotonic()
        plan: PlanData | str
        try:
            if method.is_recipe:
                plans, spent_s = self._recipes(method.density)
                started = time.monotonic() - spent_s
                plan = plans.get(method.plan) or _why_not(method, plans)
            elif method.plan == "auto":
                # With micro-batches and remat chosen, as `rhino.plan` does.
                plan = best_cut(self._search(self._request("best"), *self.meshes))
            else:
                plan = self._choose(method.plan)
        except InfeasiblePlanError as error:
            return self._ended(method, started, error)
        return self._ended(method, started, plan)

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
            return self._ended(method, started, error)
        return self._ended(method, started, plan)

    def _recipes(self, density: str) -> tuple[dict[str, PlanData | None], float]:
        """Return the plans of all recipes of a density, and the seconds that they took.

        They are planned at once. Recipes that are not possible on the mesh are left
        out; None where the program has nothing that a recipe could shard.
        """
        known = self._by_density.get(density)
        if known is not None:
            return known
        started, mesh = time.monotonic(), self.meshes[0]
        if len(self.meshes) > 1:
            mesh = self._choose("fast").mesh_axes
        request = replace(self._request("best"), density=density)
        plans = make_recipe_plans(self.traced.program, mesh, self.target, request)
        for own, problem in in_parts(self._search(request, mesh)):
            plans |= plans_of_recipes(problem, self.target, own.request)
        found = self._by_density[density] = plans, time.monotonic() - started
        return found

    def _choose(self, level: str) -> PlanData:
        program, request = self.traced.program, self._request(level)
        return find(program, self.meshes, self.target, request).plan()

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

    def _ended(
        self,
        method: ShardingMethod,
        started: float,
        end: PlanData | InfeasiblePlanError | str,
    ) -> Planned:
        """Return how planning ended.

        Args:
          method: the method.
          started: monotonic time at which it started.
          end: the plan, the error if nothing fits, or why the method is not possible.
        """
        result = Result(
            status="ok", method=method.name, plan_s=time.monotonic() - started
        )
        if not isinstance(end, PlanData):
            status = "not allowed" if isinstance(end, str) else "no plan"
            return Planned(replace(result, status=status, error=str(end)), None)
        plan = with_trees(end, self.traced, None)
        result = replace(
            result,
            mesh=dict(plan.mesh_axes),
            predicted=Measure.of(plan.predicted, plan.collectives),
            candidates=tuple(map(to_json, plan.refined)),
        )
        return Planned(result, plan)


def _why_not(method: ShardingMethod, plans: Mapping[str, PlanData | None]) -> str:
    if method.plan in plans:
        return f"the program has nothing that {method.plan} could cut."
    return f"{method.plan} needs a mesh of more axes, or experts."
