"""Cost of configurations; those that share a model are evaluated together.

`Pending` has configurations that differ in their budgets alone, until they are
searched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.attention.sites import sites_of
from rhino_jax.errors import RhinoError
from rhino_jax.explain.plan import Plan
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import FORMS, chosen
from rhino_jax.passes.microbatch import cut_in
from rhino_jax.plan.form_pins import without_forms
from rhino_jax.plan.pin_trees import expand_pins
from rhino_jax.plan.resolved_pins import resolve_pins
from rhino_jax.planner.cuts import as_requested
from rhino_jax.planner.meshes import MeshAxes, candidates, where_pins_hold
from rhino_jax.planner.options import PlanOptions
from rhino_jax.planner.origin import with_origin
from rhino_jax.planner.search.folding import solved_by
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.variant_search import Search
from rhino_jax.runtime.meshes import devices_here, make_mesh
from rhino_jax.runtime.sharded import with_trees
from rhino_jax.sweep.jobs import Best, BudgetJobs, BudgetSweep, Meshes, SearchOutcome
from rhino_jax.sweep.point import (
    WHAT,
    Point,
    SweepConfig,
    format_stages,
    price_per_step,
    why_not,
)
from rhino_jax.units import format_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Configurations that differ in their budgets alone, until they are searched.

    Attributes:
      group: the configurations.
      traced: the function.
      plan_options: options of every plan.
      job: the request to search or plan.
      target: the hardware.
      search: the search, if the passes are given; None if they are chosen, too.
    """

    group: tuple[SweepConfig, ...]
    traced: Traced
    plan_options: PlanOptions
    job: BudgetJobs | BudgetSweep
    target: Target
    search: Search | None = None

    def plan(self, made_for: int, budget: int) -> Plan:
        """Return the plan made for one budget as a plan for another that it fits."""
        assert isinstance(self.job, BudgetSweep)
        mesh = None if self.job.mesh is None else make_mesh(self.job.mesh, WHAT)
        plan = Plan.of(
            self.job.options_within(made_for).plan_with(self.traced, mesh, None)
        )
        if made_for == budget:
            return plan
        origin = plan.origin
        if origin is not None:
            origin = replace(
                origin, plan_options=self.job.options_within(budget), solved=None
            )
        return replace(plan, memory_budget_bytes=budget, origin=origin)

    @property
    def title(self) -> str:
        """Name of these configurations, for messages."""
        first, target = self.group[0], self.target
        devices = first.devices or target.num_devices
        if first.mesh is not None:
            devices = math.prod(n for _, n in first.mesh)
        said = [f"{devices} devices of {target.name}"]
        for name in ("batch", "stages", "microbatches"):
            value = getattr(first, name)
            if value not in (None, 1):
                said.append(f"{name} {format_stages(value)}")
        return ", ".join(said)


MAX_AXES = 2
"""Maximum number of axes of compared meshes if none is given; a third seldom gains."""


@dataclass(slots=True, eq=False)
class Evaluator:
    """Evaluator of groups of configurations, with a cache of what they share.

    Attributes:
      plan_options: options of every plan.
      level: "fast": the first plan of the best mesh; "best": with further search.
      meshes: searches of meshes.
      targets: (hardware, number of devices) → target.
      functions: id of a trace → its number; the sweep keeps the traces alive.
    """

    plan_options: PlanOptions
    level: str
    meshes: Meshes = field(default_factory=Meshes)
    targets: dict[tuple[Any, int | None], Target] = field(default_factory=dict)
    functions: dict[int, int] = field(default_factory=dict)

    def target(self, config: SweepConfig) -> Target:
        """Return the hardware of a configuration, with its number of devices.

        Raises:
          HardwareError: there is no such hardware.
        """
        hardware = config.hardware
        key = hardware if isinstance(hardware, str) else id(hardware), config.devices
        found = self.targets.get(key)
        if found is None:
            found = self.targets[key] = target_of(config, self.plan_options)
        return found

    def group(self, config: SweepConfig) -> Hashable:
        """Return a key equal for configurations that differ only in budget.

        Spellings of hardware do not matter: "v5e" with 8 devices is "v5e:8".
        """
        try:
            target = self.target(config)
        except RhinoError:
            return id(config)
        devices = config.devices or target.num_devices
        return target, devices, config.mesh, *config.passes

    def analysis(self, program: Program, target: Target) -> ProgramAnalysis:
        """As `Meshes.analysis`."""
        return self.meshes.analysis(self.meshes.number(program), target)

    def begin(
        self, traced: Traced, group: Sequence[SweepConfig]
    ) -> Pending | list[Point]:
        """Return the search that a group needs, or its points if impossible.

        Args:
          traced: the function.
          group: configurations that differ in their budgets alone.
        """
        first = group[0]
        try:
            target = self.target(first)
            plan_options = replace(self.plan_options, hardware=target)
            is_whole = first.stages != 1 or first.microbatches == "auto"
            if is_whole or plan_options.recompute == "auto":
                return self._whole(traced, group, target, plan_options)
            return self._pending(traced, group, target, plan_options)
        except RhinoError as error:
            return refused(group, why_not(error))

    def end(self, pending: Pending, answer: SearchOutcome) -> list[Point]:
        """Return the points of configurations, from the results within each budget."""
        pairs = zip(pending.group, pending.job.budgets, strict=True)
        return [self._point(pending, c, b, answer.best[b]) for c, b in pairs]

    def _whole(
        self,
        traced: Traced,
        group: Sequence[SweepConfig],
        target: Target,
        plan_options: PlanOptions,
    ) -> Pending:
        """Return the pending search of a group for which passes are chosen, too."""
        first = group[0]
        if target.num_devices is None and first.devices is not None:
            target = replace(target, num_devices=first.devices)
        plan_options = replace(
            plan_options,
            hardware=target,
            stages=first.stages,
            microbatches=first.microbatches,
            level=self.level,
        )
        number = self.functions.setdefault(id(traced), len(self.functions))
        budgets = tuple(self._budget(c, target) for c in group)
        usable = 1 - target.device.reserve_share
        job = BudgetSweep(number, plan_options, first.mesh, budgets, usable)
        return Pending(tuple(group), traced, plan_options, job, target)

    def _budget(self, config: SweepConfig, target: Target) -> int:
        return int(config.memory_budget_bytes or self.plan_options.budget_bytes(target))

    def _pending(
        self,
        traced: Traced,
        group: Sequence[SweepConfig],
        target: Target,
        plan_options: PlanOptions,
    ) -> Pending:
        first = group[0]
        given = expand_pins(plan_options.pins, traced)
        pinned, forms = without_forms(given, sites_of(traced.forms, given))
        if first.mesh is not None:
            meshes = [first.mesh]
            pins = resolve_pins(pinned, traced.program, first.mesh)
        else:
            every = candidates(
                traced,
                target,
                first.devices or target.num_devices or len(devices_here(WHAT)),
            )
            few = [axes for axes in every if len(axes) <= MAX_AXES] or every
            meshes, pins = where_pins_hold(few, pinned, traced.program)
        search = plan_options.search_on(traced, None, target, meshes, pins, pinned)
        if forms:
            search = search.after([chosen(FORMS, forms)])
        search = as_requested(search.asking(has_recipes=False))
        if first.microbatches != 1:
            assert isinstance(first.microbatches, int)
            search = search.after([cut_in(first.microbatches)])
        usable = 1 - target.device.reserve_share
        job = BudgetJobs(
            self.meshes.number(search.running.program),
            target,
            tuple(map(tuple, meshes)),
            search.request,
            tuple(int(usable * self._budget(c, target)) for c in group),
            self.level,
        )
        return Pending(tuple(group), traced, plan_options, job, target, search)

    def _point(
        self, pending: Pending, config: SweepConfig, usable: int, best: Best | str
    ) -> Point:
        """Return the point of a configuration, whose plan is made on request."""
        target, budget = pending.target, self._budget(config, pending.target)
        if isinstance(best, str):
            devices = target.num_devices or 0
            return _nothing(config, target.name, devices, (), budget, best)
        devices = math.prod(n for _, n in best.axes)
        if best.predicted is None:
            peak = math.ceil(best.smallest_peak)
            why = f"needs {format_bytes(peak)} of {format_bytes(usable)} per device"
            return _nothing(config, target.name, devices, best.axes, budget, why, peak)

        def make() -> Plan:
            if pending.search is None:
                return pending.plan(best.made_for, budget)
            return self._plan(pending, pending.search, config, usable, best)

        predicted = best.predicted
        return Point(
            target.name,
            devices,
            tuple(best.axes),
            budget,
            *config.passes,
            True,
            "",
            predicted.step_time_s,
            predicted.compute_s,
            predicted.communication_s,
            predicted.peak_bytes,
            price_per_step(target, devices, predicted.step_time_s),
            make,
        )

    def _plan(
        self,
        pending: Pending,
        search: Search,
        config: SweepConfig,
        usable: int,
        best: Best,
    ) -> Plan:
        """Build the model of a mesh again, and return the plan of a known solution."""
        assert best.labels is not None
        plan_options = replace(
            pending.plan_options,
            memory_budget_bytes=self._budget(config, pending.target),
            microbatches=config.microbatches,
            stages=1,
            level=self.level,
        )
        search = search.asking(memory_budget_bytes=usable).on(best.axes)
        started = time.monotonic()
        analysis = self.analysis(search.running.program, search.target)
        request = replace(search.request, memory_budget_bytes=best.made_for)
        problem = build_mesh_problem(analysis, best.axes, request).within(usable)
        one = solved_by(problem, best.labels)
        solved = replace(one, solution=replace(one.solution, bound=best.bound_s))
        found = SearchResult([solved], (), [], search.target, search.request, started)
        mesh = make_mesh(best.axes, WHAT)
        plan = with_trees(search.plan(found), search.traced, mesh)
        return Plan.of(with_origin(plan, plan_options, search.traced, mesh, None))


def refused(group: Sequence[SweepConfig], why: str) -> list[Point]:
    """Return points of configurations that are not possible, with the reason."""
    return [
        _nothing(c, c.hardware if isinstance(c.hardware, str) else "", 0, (), 0, why)
        for c in group
    ]


def target_of(config: SweepConfig, plan_options: PlanOptions) -> Target:
    """Return the hardware of a configuration, with its number of devices."""
    hardware = config.hardware
    if isinstance(hardware, str) and config.devices is not None and ":" not in hardware:
        return load_target(f"{hardware}:{config.devices}")
    if hardware is not None:
        return load_target(hardware)
    return plan_options.target_of(None)


def _nothing(
    config: SweepConfig,
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
        *config.passes,
        why=why,
        peak_bytes=peak_bytes,
    )
