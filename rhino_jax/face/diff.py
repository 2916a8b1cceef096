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
    """What changes from plan `a` to plan `b`: predictions, specs, collectives.

    Plans of other programs, meshes and hardware may be compared too; arguments and
    results are then matched by tree path.

    Args:
      a, b: plans, as `rhino.plan` or `rhino.load_plan` gives them.
    Returns:
      The differences; `print` it to read it. Bytes are per device, times in seconds
      per step, both as predicted.
    Raises:
      PlanFileError: one of them is no plan.
    Example:
      >>> print(rhino.diff(rhino.load_plan("monday.json"), plan))  # doctest: +SKIP
    """
    return dressed(PlanDiff, data.diff(a, b))
