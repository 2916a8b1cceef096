"""A plan in one line: what `print(plan)` shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rhino_jax.ir.spec import axes_text
from rhino_jax.pipeline.of_plan import idle_stages, link_wait_s, schedule_of
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.units import format_bytes, format_seconds, format_share


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData


def format_mesh(mesh_axes: Sequence[tuple[str, int]]) -> str:
    """Format mesh axes as `data=4 × model=2`."""
    return axes_text(mesh_axes, " × ") if mesh_axes else "one device"


def num_devices(mesh_axes: Sequence[tuple[str, int]]) -> int:
    return math.prod(size for _, size in mesh_axes)


def one_line(plan: PlanData) -> str:
    """Return program, mesh, hardware, step, peak, gap and status in one line."""
    predicted, search = plan.predicted, plan.search
    # For several stages there is no bound over all stage cuts, so no gap.
    status = search.status + " on this mesh" * (search.status == "optimal")
    gap = f" gap {format_share(search.gap)}," if not plan.has_tasks else _idle(plan)
    return (
        f"Plan({plan.program_name} on {format_mesh(plan.mesh_axes)},"
        f" {plan.hardware}: {format_seconds(predicted.step_time_s)}/step,"
        f" peak {format_bytes(predicted.peak_bytes)}"
        f" of {format_bytes(plan.memory_budget_bytes)},"
        f"{gap} {status})"
    )


def _idle(plan: PlanData) -> str:
    """Say that stages have no work, or idle half of the step, mostly for links."""
    if plan.pipeline is None:
        return ""
    if idle := idle_stages(plan.pipeline):
        return f" {len(idle)} of {len(plan.stages)} stages idle,"
    simulation = simulate(schedule_of(plan.pipeline))
    if simulation.bubble < 0.5 or not link_wait_s(plan.pipeline, simulation):
        return ""
    share = format_share(simulation.bubble)
    return f" stages idle {share}, mostly for links between them,"
