"""The difference of two plans, and its displays."""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.explain.report.changes import diff_to_html, diff_to_text
from rhino_jax.explain.results.dress import dressed
from rhino_jax.plan import diff as data
from rhino_jax.plan.plan import PlanData


class PlanDiff(data.PlanDiffData):
    """The differences of two plans; `print` it to read it.

    Its attributes are those of `rhino_jax.plan.diff.PlanDiffData`.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return diff_to_text(self)

    def _repr_html_(self) -> str:
        return diff_to_html(self)


MAX_WORTH = 6
"""Maximum number of changed arrays, the largest, whose worth is evaluated: each costs a
brief search."""


def diff(a: PlanData, b: PlanData, *, worth: bool = True) -> PlanDiff:
    """Compare plan `a` with plan `b`: predictions, specs, collectives.

    Plans of other programs, meshes and hardware may be compared too; arguments and
    results are then matched by tree path.

    Args:
      a, b: plans, as `rhino.plan` or `rhino.load_plan` return them.
      worth: whether to evaluate what the changes of the largest arrays are worth, each
        by itself: the step of `b` with that array laid out as in `a`, less its step.
        Only if both plans are of one program, mesh and hardware, and `b` was planned in
        this process. Takes about a second for each.
    Returns:
      The differences; `print` it to read it. Bytes are per device, times in seconds
      per step, both as predicted.
    Raises:
      PlanFileError: one of them is not a plan.
    Example:
      >>> print(rhino.diff(rhino.load_plan("monday.json"), plan))  # doctest: +SKIP
    """
    found = data.diff(a, b)
    is_same = found.has_same_fingerprint and a.hardware == b.hardware
    if worth and is_same and b.origin is not None and b.is_one_mesh:
        found = _with_worth(found, a, b)
    return dressed(PlanDiff, found)


def _with_worth(
    found: data.PlanDiffData, a: PlanData, b: PlanData
) -> data.PlanDiffData:
    from rhino_jax.explain.questions import worth_of

    inputs = {leaf.path: leaf.spec for leaf in a.inputs}
    asked = [c.path for c in found.specs if c.side == "input" and c.path in inputs]
    worth = worth_of(b, {path: inputs[path] for path in asked[:MAX_WORTH]})
    specs = tuple(
        replace(c, worth_s=worth.get(c.path)) if c.side == "input" else c
        for c in found.specs
    )
    return replace(found, specs=specs)
