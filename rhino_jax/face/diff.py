"""What changes from one plan to another, and how it is shown."""

from __future__ import annotations

from rhino_jax.face.dress import dressed
from rhino_jax.plan import diff as data
from rhino_jax.plan.plan import Plan
from rhino_jax.report.changes import diff_to_html, diff_to_text


class PlanDiff(data.PlanDiff):
    """What differs between two plans; `print` it to read it.

    Its attributes are those of `rhino_jax.plan.diff.PlanDiff`.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return diff_to_text(self)

    def _repr_html_(self) -> str:
        return diff_to_html(self)


def diff(a: Plan, b: Plan) -> PlanDiff:
    """What changes from plan `a` to plan `b`.

    Example:
      >>> print(diff(rhino.load_plan("monday.json"), plan))  # doctest: +SKIP
    Raises:
      PlanFileError: one of them is no plan.
    """
    return dressed(PlanDiff, data.diff(a, b))
