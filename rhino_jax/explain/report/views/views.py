"""All drawings of a plan, as sections of its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhino_jax.explain.report.section import Section
from rhino_jax.explain.report.step import step_of
from rhino_jax.explain.report.views.memory import memory
from rhino_jax.explain.report.views.network import network
from rhino_jax.explain.report.views.regions import regions
from rhino_jax.explain.report.views.timeline import timeline
from rhino_jax.explain.report.views.treemap import treemap


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData


def views_of(plan: PlanData) -> tuple[Section, ...]:
    """Return sections with the drawings of a plan, without those that have no data."""
    if plan.has_tasks:
        return (Section("what a device holds", drawing=treemap(plan)),)
    step = step_of(plan)
    found = (
        Section("one step, by the clock", drawing=timeline(step)),
        Section("memory over the step", drawing=memory(step, plan.memory_budget_bytes)),
        Section("what a device holds", drawing=treemap(plan)),
        Section("the mesh", drawing=network(plan) if plan.mesh_axes else ""),
        Section("the program, by line", drawing=regions(plan), is_open=False),
    )
    return tuple(s for s in found if s.drawing)
