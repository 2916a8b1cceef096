"""Checks that a plan belongs to a program and a mesh, with the differences if not."""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.errors import PlanFileError
from rhino_jax.ir.printer import format_array
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import axes_text
from rhino_jax.plan.files.schema import current_versions
from rhino_jax.plan.fingerprint import first_change, outline, outline_of
from rhino_jax.plan.plan import PlanData


def check_fits(
    plan: PlanData,
    fingerprint: str,
    mesh_axes: Sequence[tuple[str, int]],
    *,
    program: Program | None = None,
    what: str = "`Plan`",
) -> None:
    """Refuse a plan of another program or mesh.

    Args:
      plan: the plan to check.
      fingerprint: fingerprint of the program at hand.
      mesh_axes: (name, size) of the mesh at hand, major first.
      program: the program at hand, to report which inputs differ; None: report the
        fingerprints.
      what: the calling function, for the message.
    Raises:
      PlanFileError: names the inputs, axes or versions that differ.
    """
    differences = _mesh_differences(plan.mesh_axes, mesh_axes)
    is_other = fingerprint != plan.fingerprint
    change = ""
    if is_other and program is not None:
        change = first_change(outline_of(plan), outline(program))
    if is_other:
        if program is not None:
            old = {leaf.path: (leaf.dtype, leaf.shape) for leaf in plan.inputs}
            values = [(i.path, program.values[i.value]) for i in program.inputs]
            new = {path: (value.dtype, value.shape) for path, value in values}
            differences += [
                f"{path} is {format_array(*new[path])}, was {format_array(*old[path])}"
                for path in old
                if path in new and old[path] != new[path]
            ]
            differences += [f"{path} is missing" for path in old if path not in new]
            differences += [f"{path} is new" for path in new if path not in old]
            if program.name != plan.program_name:
                differences.append(f"the function is `{program.name}`")
        versions, now = dict(plan.versions), current_versions()
        differences += [
            f"made with {name} {versions[name]}, this is {now[name]}"
            for name in now
            if name in versions and versions[name] != now[name]
        ]
    if is_other and not (differences or change):
        differences = ["same inputs, but the function's code (or its rules) changed"]
    if not differences and not change:
        return
    shown = differences[:8]
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    shown += [change] if change else []
    prints = f"the plan's fingerprint {plan.fingerprint[:12]},"
    prints += f" this program's {fingerprint[:12]}; "
    raise PlanFileError(
        f"{what}: the plan of `{plan.program_name}` is not for this"
        + (" program." if is_other else " mesh."),
        where="; ".join(shown),
        numbers=("" if change or not is_other else prints)
        + f"planned for {axes_text(plan.mesh_axes)}, given {axes_text(mesh_axes)}",
        fix="plan this program on this mesh: rhino.plan(fn, *args, mesh=mesh).",
    )


def _mesh_differences(
    planned: Sequence[tuple[str, int]], given: Sequence[tuple[str, int]]
) -> list[str]:
    if tuple(planned) == tuple(given):
        return []
    old, new = dict(planned), dict(given)
    out = [f"axis '{name}' is missing" for name in old if name not in new]
    out += [f"axis '{name}' is new" for name in new if name not in old]
    out += [
        f"axis '{name}' has size {new[name]}, was {old[name]}"
        for name in old
        if name in new and old[name] != new[name]
    ]
    return out or ["the axes are in another order"]
