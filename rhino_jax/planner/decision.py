"""One decision: its options planned one by one, and why the others were left."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rhino_jax.plan.plan import PlanData
from rhino_jax.units import format_seconds


AUTO = "auto"
AS_WRITTEN = "as written"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionOptions:
    """The decisions of a plan, as its user takes them; "auto" leaves one to the
    planner. `rhino_jax.options.UserOptions` describes them."""

    microbatches: Any = AUTO
    recompute: str = AUTO
    loops: str = AUTO
    grouped: str = AUTO
    stages: Any = AUTO
    schedule: str = AUTO
    storage: str = AS_WRITTEN
    per_microbatch: Any = ()

    @property
    def may_recompute(self) -> bool:
        """Whether the planner chooses what is recomputed."""
        return self.recompute == AUTO


class NotFaster(Exception):
    """A plan is not fast enough.

    Attributes:
      step_s: the shortest planned step in seconds, or a lower bound on all; infinite
        where neither is known.
      count: the number of micro-batches.
    """

    def __init__(self, step_s: float, count: int = 0) -> None:
        super().__init__(step_s)
        self.step_s, self.count = step_s, count


Option = TypeVar("Option", bound=Hashable)


@dataclass(slots=True, eq=False)
class Decision(Generic[Option]):
    """The options of a decision that were planned so far.

    Attributes:
      make: plans an option.
      refusals: errors for which an option is left; others are raised.
      plans: option → its plan, for those that have one.
      left: option → the error for which it was left.
      bounds: option that was left as too slow → lower bound on its step in seconds.
    """

    make: Callable[[Option], PlanData]
    refusals: tuple[type[Exception], ...]
    plans: dict[Option, PlanData] = field(default_factory=dict)
    left: dict[Option, Exception] = field(default_factory=dict)
    bounds: dict[Option, float] = field(default_factory=dict)

    def plan(self, option: Option) -> PlanData | None:
        """Plan an option, unless that was done before; None where it is left."""
        if option not in self.plans and option not in self.left:
            try:
                self.plans[option] = self.make(option)
            except NotFaster as slower:
                self.left[option], self.bounds[option] = slower, slower.step_s
            except self.refusals as error:
                self.left[option] = error
        return self.plans.get(option)

    @property
    def best(self) -> Option | None:
        """The option with the shortest step, the first of equal ones."""
        return min(self.plans, key=self.seconds, default=None)

    def fastest(self) -> PlanData:
        """Return the plan with the shortest step.

        Raises:
          Exception: of the option that was left last, where there is no plan.
        """
        if self.best is None:
            raise [*self.left.values()][-1]
        return self.plans[self.best]

    def seconds(self, option: Option) -> float:
        """Plan an option; return its step in seconds, or a lower bound where it is
        left."""
        if (plan := self.plan(option)) is not None:
            return plan.predicted.step_time_s
        return self.bounds.get(option, math.inf)

    def text(self, option: Option) -> str:
        """Return the step, or say why there is no plan."""
        seconds = format_seconds(self.seconds(option))
        if option in self.plans:
            return seconds
        return f"at least {seconds}" if option in self.bounds else "not possible"
