"""Methods of a plan that need its search problem: replan, explain, and recipes."""

from __future__ import annotations

from typing import Any

from rhino_jax.errors import PlanFileError
from rhino_jax.explain.results.dress import dressed
from rhino_jax.explain.why import Why
from rhino_jax.plan import plan as data
from rhino_jax.plan.plan import AnyPlan


class Explored(data.PlanData):
    """A plan that can be planned again, starting from itself.

    The implementation is in `rhino_jax.planner.origin` and
    `rhino_jax.explain.questions`.
    """

    def with_(
        self: AnyPlan,
        *,
        pins: Any = None,
        memory_budget_bytes: float | str | None = None,
        mesh: Any = None,
        microbatches: int | str | None = None,
        recompute: str | None = None,
        stages: int | str | None = None,
        schedule: str | None = None,
    ) -> AnyPlan:
        """Plan the same program again with some options changed.

        With other pins or another budget, this plan's search problem is solved again,
        on its mesh and with its passes (micro-batches, remat), in a fraction of the
        time; `recipes` stay those of this plan. The stage cuts of a plan in stages stay
        if only pins of layouts change. If nothing fits this way, and for all other
        changes, everything but tracing is repeated.

        Args:
          pins: as in `auto_shard`; added to the pins of this plan, and replacing those
            with the same key.
          memory_budget_bytes, mesh, microbatches, recompute, stages, schedule: as in
            `auto_shard`; None: as in this plan's request. A mesh that rhino chose
            stays, unless `stages` is given.

        Raises:
          PlanFileError: the plan was loaded from a file, without its program. PinError,
            InfeasiblePlanError, …: as `rhino.plan`.
        """
        changes = {
            "pins": pins,
            "memory_budget_bytes": memory_budget_bytes,
            "mesh": mesh,
            "microbatches": microbatches,
            "recompute": recompute,
            "stages": stages,
            "schedule": schedule,
        }
        return dressed(type(self), _origin(self, "with_").with_(self, changes))

    def recipe(self: AnyPlan, name: str) -> AnyPlan:
        """Return an expert's recipe at its best, as a plan: to run, verify and compare.

        It is the one in this plan's table of recipes, whether it fits or not.

        Args:
          name: as in `plan.recipes`.

        Raises:
          RhinoError: there is no such recipe, or the program does not allow it.
          PlanFileError: as `with_`.
        """
        from rhino_jax.explain.questions import recipe

        _origin(self, "recipe")
        return dressed(type(self), recipe(self, name))

    def why(self, key: str) -> Why:
        """Explain why a value has its layout, and what each alternative would cost.

        The value is fixed to each of its other layouts, one after the other, and
        everything else is solved again: the cost of a layout is what
        `plan.with_(pins={key: spec})` would find. `print` the result to read it.

        For a plan in stages, the result says on which stage the value is, and why; and
        what its other layouts cost that stage and the simulated step. Values that
        several stages have are explained for each (`Why.also`).

        Args:
          key: a tree path or glob of arguments and results, a source line (`gpt.py:61`;
            in notebooks `In[7]:39`), a scope, an op (`dot_general #12`) or a value
            (`%34`), as the plan's tables name them.

        Raises:
          RhinoError: the key names nothing.
          PlanFileError: as `with_`.
        """
        from rhino_jax.explain.questions import why

        _origin(self, "why")
        return why(self, key)

    def why_not(self, key: str, spec: Any) -> Why:
        """Explain what one layout of a value would cost, or why it is impossible.

        Args:
          key: as in `why`.
          spec: a PartitionSpec; for a plan in stages also the number of a stage: the
            cost of placing the value there, with everything cut and planned again.
        """
        from rhino_jax.explain.questions import why

        _origin(self, "why_not")
        return why(self, key, spec)


def _origin(plan: data.PlanData, what: str) -> Any:
    if plan.origin is None:
        raise PlanFileError(
            f"`plan.{what}`: the program of this plan is not at hand.",
            where=f"the plan of `{plan.program_name}`",
            numbers="it was loaded from a file, or planned inside of another trace",
            fix="plan = rhino.plan(fn, *args, mesh=mesh), which the cache makes quick;"
            " then ask that plan.",
        )
    return plan.origin
