"""Configurations that differ in their budgets alone, until they are searched."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rhino_jax.explain.results.plan import Plan
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.target import Target
from rhino_jax.planner.options import Wishes
from rhino_jax.planner.variant_search import Search
from rhino_jax.runtime.meshes import make_mesh
from rhino_jax.sweep.configs import WHAT, SweepConfig
from rhino_jax.sweep.meshes import BudgetJobs
from rhino_jax.sweep.point import format_stages
from rhino_jax.sweep.whole import BudgetSweep


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Configurations that differ in their budgets alone, until they are searched.

    Attributes:
      group: the configurations.
      traced: the function.
      wishes: options of every plan.
      asked: the request to search or plan.
      target: the hardware.
      search: the search, if the passes are given; None if they are chosen, too.
    """

    group: tuple[SweepConfig, ...]
    traced: Traced
    wishes: Wishes
    asked: BudgetJobs | BudgetSweep
    target: Target
    search: Search | None = None

    def plan(self, made_for: int, budget: int) -> Plan:
        """Return the plan made for one budget as a plan for another that it fits."""
        assert isinstance(self.asked, BudgetSweep)
        mesh = None if self.asked.mesh is None else make_mesh(self.asked.mesh, WHAT)
        plan = self.asked.asking(made_for).plan_with(self.traced, mesh, None)
        if made_for == budget:
            return plan
        origin = plan.origin
        if origin is not None:
            origin = replace(origin, wishes=self.asked.asking(budget), solved=None)
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
