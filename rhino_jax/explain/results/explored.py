"""What asks a plan's origin: why it is so, and what would be otherwise."""

from __future__ import annotations

from typing import Any

from rhino_jax.errors import PlanFileError
from rhino_jax.explain.why import Why
from rhino_jax.plan import plan as data
from rhino_jax.plan.plan import AnyPlan


class Explored(data.PlanData):
    """A plan that can be planned again from where it is.

    What does it stands in `rhino_jax.planner.origin` and `rhino_jax.explain`.
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
        """The same program planned again, from this plan on.

        With other pins or another budget, the problem that gave this plan is solved
        again, on its mesh and with its passes (micro-batches, recompute), in a fraction
        of the time; `recipes` stay those of this plan. Plans in stages stay cut as they
        are where pins of layouts are all that changes. Where nothing fits so, and for
        all other changes, everything but tracing is done anew.

        Args:
          pins: as of `auto_shard`; hold beside the pins of this plan, and instead of
            them where they have the same key.
          memory_budget_bytes, mesh, microbatches, recompute, stages, schedule: as of
            `auto_shard`; None: as they were asked for. Where rhino chose the mesh it is
            kept, unless `stages` is given.
        Raises:
          PlanFileError: the plan was loaded, and its program is not at hand.
          PinError, InfeasiblePlanError, …: as `rhino.plan`.
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
        return _origin(self, "with_").with_(self, changes)

    def recipe(self: AnyPlan, name: str) -> AnyPlan:
        """An expert's recipe at its best, as a plan: to run, verify and compare.

        It is the one that stands beside this plan in its table, whether it fits or not.

        Args:
          name: as in `plan.recipes`.
        Raises:
          RhinoError: there is no such recipe, or the program does not allow it.
          PlanFileError: as `with_`.
        """
        return _origin(self, "recipe").recipe(self, name)

    def why(self, key: str) -> Why:
        """Why a value is laid out as it is, and what each alternative would cost.

        The value is held in each of its other layouts, one after the other, and
        everything else is solved again: what is said of a layout is what
        `plan.with_(pins={key: spec})` would find. `print` it to read it.

        Of a plan in stages the answer says on which stage the value is, and why there;
        what its other layouts cost that stage, and the step by the clock. Values that
        several stages have are answered for each (`Why.also`).

        Args:
          key: a tree path or glob of arguments and results, a source line
            (`gpt.py:61`; in notebooks `In[7]:39`), a scope, an op (`dot_general #12`)
            or a value (`%34`), as the plan's tables name them.
        Raises:
          RhinoError: the key names nothing.
          PlanFileError: as `with_`.
        """
        return _origin(self, "why").why(self, key)

    def why_not(self, key: str, spec: Any) -> Why:
        """What one layout of a value would cost, or why it cannot be.

        Args:
          key: as of `why`.
          spec: a PartitionSpec; of a plan in stages also the number of a stage: what it
            would cost to have the value there, everything cut and planned again.
        """
        return _origin(self, "why_not").why(self, key, spec)


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
