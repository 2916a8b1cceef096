"""Entry points of `plan.code` and `audit.patch`."""

from __future__ import annotations

from rhino_jax.errors import PlanFileError, RhinoError, nearest
from rhino_jax.export.parts import Subject
from rhino_jax.export.patch import diff_of
from rhino_jax.export.styles import STYLES, constrained
from rhino_jax.plan.plan import PlanData


SPECS = "specs"
"""The only style for plans in stages, which are SPMD pipelines."""


def patch_of(plan: PlanData) -> str:
    """Return a diff of the user's files that adds a plan's decisions as constraints.

    Existing constraints get the plan's specs. Empty if nothing changes, or the plan was
    not made in this process.
    """
    if plan.traced is None or not plan.is_one_mesh:
        return ""
    subject = Subject(plan, plan.traced)
    return diff_of(subject.constraints, constrained(subject))


def code_of(plan: PlanData, style: str) -> str:
    """Return a plan as the text of a Python module that does not need rhino.

    Args:
      plan: the plan.
      style: one of `STYLES`.

    Raises:
      RhinoError: no style has that name, or the plan has several stages.
      PlanFileError: the style refers to the program's lines, and the plan was read from
        a file.
    """
    what = f"`plan.code({style!r})`"
    if style not in STYLES:
        raise RhinoError(
            f"{what}: no style has that name.{nearest(style, STYLES)}",
            numbers=f"styles: {', '.join(STYLES)}",
            fix="use one of these.",
        )
    if not plan.is_one_mesh and not (plan.is_one_program and style == SPECS):
        fix = "plan.jit(fn) runs it; or plan with stages=1 and write that out."
        if plan.is_one_program:
            fix = f"take style {SPECS!r}, which says what stages hold; {fix}"
        raise RhinoError(
            f"{what}: the plan has stages, which no constraints say.",
            where=f"the plan of `{plan.program_name}`",
            numbers=f"{plan.num_stages} stages, schedule {plan.schedule!r}",
            fix=fix,
        )
    if plan.in_tree is None or (plan.traced is None and style != SPECS):
        raise PlanFileError(
            f"{what}: the program's lines are not known.",
            where=f"the plan of `{plan.program_name}`, read from a file",
            numbers="style 'specs' does without them",
            fix="plan.jit(fn).plan(*args).code(style): the same plan, of your lines.",
        )
    return STYLES[style](Subject(plan, plan.traced))
