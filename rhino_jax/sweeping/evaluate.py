"""Configurations that share a model, solved together.

Those that differ in their budgets alone are one problem: the best choice without limit
is the best within every budget that it fits, so that the largest budget is solved
first, and the others only where what was found does not fit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.apply.meshes import devices_here, make_mesh
from rhino_jax.apply.with_plan import with_trees
from rhino_jax.errors import RhinoError
from rhino_jax.face.plan import Plan
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Device, Target
from rhino_jax.optimize.incumbents import EFFORTS
from rhino_jax.optimize.problem import Labels
from rhino_jax.plan.pins.resolve import resolve_pins
from rhino_jax.plan.pins.trees import expand_pins
from rhino_jax.plan.records import Predicted
from rhino_jax.planning.cuts import as_asked
from rhino_jax.planning.meshes import MeshAxes, candidates, where_pins_hold
from rhino_jax.planning.origin import with_origin
from rhino_jax.planning.search import Search, tell_nobody
from rhino_jax.planning.variants import cut_in
from rhino_jax.planning.wishes import Wishes
from rhino_jax.search.driver import COMPARED, distinct_meshes
from rhino_jax.search.found import Found
from rhino_jax.search.mesh_problem import build_mesh_problem
from rhino_jax.search.passes import SOLVE
from rhino_jax.search.read_back.assemble import costs_of
from rhino_jax.search.recipe_choices import first_choices
from rhino_jax.search.records import MeshProblem, SolvedMesh
from rhino_jax.search.solve_on_mesh import as_solution
from rhino_jax.sweeping.configs import WHAT, Config
from rhino_jax.sweeping.point import Point, price_per_step
from rhino_jax.units import format_bytes


MOST_AXES = 2
"""Axes of the meshes that are compared where none is given; a third seldom gains."""


@dataclass(slots=True, eq=False)
class Evaluator:
    """Evaluates groups of configurations, and keeps what they share.

    Attributes:
      wishes: what is asked of every plan.
      level: "fast": the best mesh's first plan; "best": searched on.
      analyses: by program and device.
    """

    wishes: Wishes
    level: str
    analyses: dict[tuple[int, Device], ProgramAnalysis] = field(default_factory=dict)

    def analysis(self, traced: Traced, target: Target) -> ProgramAnalysis:
        """Of a program; the same for all targets of one kind of device."""
        key = id(traced.program), target.device
        found = self.analyses.get(key)
        if found is None:
            found = ProgramAnalysis.of(traced.program, target)
            self.analyses[key] = found
        return replace(found, target=target)

    def points(self, traced: Traced, group: Sequence[Config]) -> list[Point]:
        """What configurations that differ in their budgets alone cost."""
        first = group[0]
        try:
            target = target_of(first, self.wishes)
            wishes = replace(self.wishes, hardware=target)
            is_whole = first.stages != 1 or first.microbatches == "auto"
            if is_whole or wishes.recompute == "auto":
                return [self._planned(traced, c, target, wishes) for c in group]
            return self._solved(traced, group, target, wishes)
        except RhinoError as error:
            name = first.hardware if isinstance(first.hardware, str) else ""
            return [_nothing(c, name, 0, (), 0, error.what) for c in group]

    def _planned(
        self, traced: Traced, config: Config, target: Target, wishes: Wishes
    ) -> Point:
        """A configuration for which the passes are chosen, too."""
        wishes = replace(
            wishes,
            stages=config.stages,
            microbatches=config.microbatches,
            memory_budget_bytes=config.memory_budget_bytes,
            level=self.level,
        )
        budget = int(wishes.budget_bytes(target))
        mesh = None if config.mesh is None else make_mesh(config.mesh, WHAT)
        try:
            plan = wishes.plan_with(traced, mesh, None)
        except RhinoError as error:
            devices = target.num_devices or 0
            return _nothing(config, target.name, devices, (), budget, error.what)
        return _point(config, target, plan.mesh_axes, budget, plan.predicted,
                      lambda: plan)  # fmt: skip

    def _solved(
        self, traced: Traced, group: Sequence[Config], target: Target, wishes: Wishes
    ) -> list[Point]:
        first = group[0]
        arguments = traced.arguments
        pinned = expand_pins(wishes.pins, arguments.tree, arguments.paths)
        if first.mesh is not None:
            meshes = [first.mesh]
            pins = resolve_pins(pinned, traced.program, first.mesh)
        else:
            count = first.devices or target.num_devices or len(devices_here(WHAT))
            every = candidates(traced, target, count)
            few = [axes for axes in every if len(axes) <= MOST_AXES] or every
            meshes, pins = where_pins_hold(few, pinned, traced.program)
        request = replace(wishes.request_of(target, pins), has_recipes=False)
        search = Search(
            traced, None, meshes, target, request, pinned, 0, WHAT, tell_nobody
        )
        search = as_asked(search, wishes.recompute)
        if first.microbatches != 1:
            assert isinstance(first.microbatches, int)
            search = search.after([cut_in(first.microbatches)])
        budgets = [
            int(c.memory_budget_bytes or wishes.budget_bytes(target)) for c in group
        ]
        best: dict[int, _Solved] = {}
        for axes in distinct_meshes(meshes, target):
            for budget, found in self._on_mesh(search, tuple(axes), budgets).items():
                if budget not in best or found.worth < best[budget].worth:
                    best[budget] = found
        return [
            self._told(search, wishes, c, b, best[b])
            for c, b in zip(group, budgets, strict=True)
        ]

    def _on_mesh(
        self, search: Search, axes: MeshAxes, budgets: Sequence[int]
    ) -> dict[int, _Solved]:
        """Budget → the best choice on a mesh."""
        analysis = self.analysis(search.running, search.target)
        request = search.request
        # What copies are too small to count depends on the budget.
        smallest = replace(request, memory_budget_bytes=min(budgets))
        problem = build_mesh_problem(analysis, axes, smallest)
        starts = first_choices(problem)
        effort = COMPARED if self.level == "fast" else EFFORTS[self.level]
        found: dict[int, _Solved] = {}
        last: SolvedMesh | None = None
        for budget in sorted(set(budgets), reverse=True):
            # What fits no budget fits no smaller one.
            is_open = last is None or last.solution.labels is not None
            if last is None or (is_open and last.solution.peak > budget):
                if last is not None and last.solution.labels is not None:
                    starts = [last.solution.labels, *starts]
                mine = problem.within(budget)
                last = SOLVE.run(None, mine, effort, request, None, starts)
            found[budget] = _Solved(axes, last, min(budgets))
        return found

    def _told(
        self, search: Search, wishes: Wishes, config: Config, budget: int, best: _Solved
    ) -> Point:
        solution, target = best.solved.solution, search.target
        if solution.labels is None:
            peak = math.ceil(solution.smallest_peak)
            why = f"needs {format_bytes(peak)} of {format_bytes(budget)} per device"
            devices = math.prod(n for _, n in best.axes)
            return _nothing(config, target.name, devices, best.axes, budget, why, peak)
        labels, bound_s = solution.labels, solution.bound
        wishes = replace(
            wishes,
            memory_budget_bytes=budget,
            microbatches=config.microbatches,
            stages=1,
            level=self.level,
        )
        asked = search.asking(memory_budget_bytes=budget).on(best.axes)
        priced = best.priced_bytes

        def make() -> Plan:
            return self._plan(asked, wishes, labels, bound_s, priced)

        predicted = best.predicted()
        return _point(config, target, best.axes, budget, predicted, make)

    def _plan(
        self,
        search: Search,
        wishes: Wishes,
        labels: Labels,
        bound_s: float,
        priced_bytes: int,
    ) -> Plan:
        """The plan of a choice that was found, priced again."""
        started, (axes,) = time.monotonic(), search.meshes
        analysis = self.analysis(search.running, search.target)
        request = replace(search.request, memory_budget_bytes=priced_bytes)
        problem = build_mesh_problem(analysis, axes, request)
        problem = problem.within(search.request.memory_budget_bytes)
        solution = replace(as_solution(problem, labels), bound=bound_s)
        solved = [SolvedMesh(problem, solution)]
        found = Found(solved, (), [], search.target, search.request, started)
        mesh = make_mesh(axes, WHAT)
        plan = with_trees(Plan.of(search.plan(found)), search.traced, mesh)
        return with_origin(plan, wishes, search.traced, mesh, None)


@dataclass(slots=True, eq=False)
class _Solved:
    """The best choice on a mesh.

    Attributes:
      axes: of the mesh.
      solved: what was found.
      priced_bytes: the budget by which its model was priced.
    """

    axes: MeshAxes
    solved: SolvedMesh
    priced_bytes: int
    _predicted: Predicted | None = None

    @property
    def worth(self) -> tuple[float, float]:
        """The less the better: the step, and where nothing fits what it would need."""
        solution = self.solved.solution
        fits = solution.labels is not None
        return (solution.objective if fits else math.inf, solution.smallest_peak)

    def predicted(self) -> Predicted:
        """What the choice costs."""
        if self._predicted is None:
            problem: MeshProblem = self.solved.mesh_problem
            labels = self.solved.solution.labels
            assert labels is not None
            self._predicted = costs_of(problem, labels)[0]
        return self._predicted


def target_of(config: Config, wishes: Wishes) -> Target:
    """The hardware of a configuration, with as many devices as it says."""
    hardware = config.hardware
    if isinstance(hardware, str) and config.devices is not None and ":" not in hardware:
        return load_target(f"{hardware}:{config.devices}")
    if hardware is not None:
        return load_target(hardware)
    return wishes.target_of(None)


def _point(
    config: Config,
    target: Target,
    axes: MeshAxes,
    budget: int,
    predicted: Predicted,
    make: Callable[[], Plan],
) -> Point:
    devices = math.prod(n for _, n in axes)
    return Point(
        target.name,
        devices,
        tuple(axes),
        budget,
        config.batch,
        config.stages,
        config.microbatches,
        True,
        "",
        predicted.step_time_s,
        predicted.compute_s,
        predicted.communication_s,
        predicted.peak_bytes,
        price_per_step(target, devices, predicted.step_time_s),
        make,
    )


def _nothing(
    config: Config,
    hardware: str,
    devices: int,
    axes: MeshAxes,
    budget: int,
    why: str,
    peak_bytes: int = 0,
) -> Point:
    return Point(
        hardware,
        devices or config.devices or 0,
        tuple(axes or config.mesh or ()),
        budget or config.memory_budget_bytes or 0,
        config.batch,
        config.stages,
        config.microbatches,
        False,
        why,
        math.inf,
        math.inf,
        math.inf,
        peak_bytes,
        None,
    )
