"""The mesh and the layout of the state that several programs share: search and
agreement of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.hardware.target import Target
from rhino_jax.ir.spec import axes_text
from rhino_jax.plan.shared import SharedLayout, Slot
from rhino_jax.planner.joint.programs import WHAT, JointPrograms
from rhino_jax.runtime.processes.agree import decided_by_first
from rhino_jax.units import format_bytes
from rhino_jax.utils.codec import from_json, to_json
from rhino_jax.utils.progress import shown


if TYPE_CHECKING:
    from rhino_jax.planner.meshes import MeshAxes
    from rhino_jax.planner.search.together import Member, SharedSolution


def decided_layout(
    programs: JointPrograms, target: Target, shared: list[list[Slot]]
) -> SharedLayout:
    """Return the mesh and the layout of the shared state: searched here, or received
    from the first of the processes that plan together.

    Args:
      programs: the programs to plan.
      target: the hardware.
      shared: for each shared array, its (program, input) slots.
    Raises:
      InfeasiblePlanError: no layout fits the memory budget.
      ProcessError: processes plan different programs, or one is lost.
    """
    first = next(iter(programs.plan_options.values()))

    def decide() -> Any:
        with shown(first.progress) as report:
            axes, found = _search(programs, target, shared, report)
        return to_json(SharedLayout(tuple(axes), found.specs, found.bound_s))

    asked = {
        "hardware": repr(target),
        "weights": repr(sorted(programs.weights.items())),
        "what is asked for": repr(
            [
                (name, w.memory_budget_bytes, w.level, w.time_limit_s, w.seed)
                for name, w in programs.plan_options.items()
            ]
        ),
    }
    return from_json(
        SharedLayout,
        decided_by_first(
            list(programs.traced.values()),
            first.processes(programs.mesh, programs.meshes(target)),
            asked,
            decide,
            WHAT,
        ),
    )


def _search(
    programs: JointPrograms,
    target: Target,
    shared: list[list[Slot]],
    report: Callable[[float | None, float | None], None],
) -> tuple[MeshAxes, SharedSolution]:
    """Return the best mesh, and the best layout on it."""
    # The solver takes a second to import, which loading a plan need not wait for.
    from rhino_jax.analysis.program_analysis import ProgramAnalysis
    from rhino_jax.planner.search.compare import COMPARED
    from rhino_jax.planner.search.driver import distinct_meshes
    from rhino_jax.planner.search.together import search_layout
    from rhino_jax.solver.incumbents import EFFORTS

    plan_options = next(iter(programs.plan_options.values()))
    analyses = [ProgramAnalysis.of(program, target) for program in programs.programs]
    meshes = programs.meshes(target)
    limit = plan_options.time_limit_s
    deadline = programs.started + (math.inf if limit is None else limit / 2)

    def layout(axes: MeshAxes, effort: Any, *, is_brief: bool) -> SharedSolution:
        members = programs.members(target, axes, shared)
        effort = replace(effort, deadline=deadline, seed=plan_options.seed)
        return search_layout(
            members, analyses, shared, axes, effort, report, is_brief=is_brief
        )

    if len(meshes) > 1:
        every = [
            (layout(tuple(axes), COMPARED, is_brief=True), i, tuple(axes))
            for i, axes in enumerate(distinct_meshes(meshes, target))
        ]
        meshes = [min((found.objective_s, i, axes) for found, i, axes in every)[2]]
    found = layout(meshes[0], EFFORTS[plan_options.level], is_brief=False)
    if not found.fits:
        members = programs.members(target, meshes[0], shared)
        raise _nothing_fits(programs, found, members, meshes[0])
    return meshes[0], found


def _nothing_fits(
    programs: JointPrograms,
    layout: SharedSolution,
    members: Sequence[Member],
    axes: MeshAxes,
) -> InfeasiblePlanError:
    request = min((m.request for m in members), key=lambda r: r.memory_budget_bytes)
    least = request.budget_for(layout.smallest_peak_bytes)
    return InfeasiblePlanError(
        f"{WHAT}: no layout of the shared state fits the memory budget.",
        where=f"programs {', '.join(programs.names)} on mesh ({axes_text(axes)});"
        f" {request.budget_text}",
        numbers=f"smallest peak found {format_bytes(layout.smallest_peak_bytes)}, with"
        " what the other programs need later",
        fix=f"raise memory_budget_bytes to {least} ({format_bytes(least)}); or plan"
        " fewer programs together, whose state need not stay.",
    )
