"""One decision: its options planned one by one, and why the others were left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from rhino_jax.errors import (
    InfeasiblePlanError,
    MicrobatchError,
    PinError,
    ScheduleError,
    StageError,
)
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Variant
from rhino_jax.units import format_seconds


AUTO = "auto"
AS_WRITTEN = "as written"

MIN_GAIN = 0.03
"""Share of the predicted step time that a plan must gain over one that is simpler: a
variant over the program as it is, a schedule over the usual one, stages over one mesh.
That is the error of predictions of two programs, compared with each other. Of nine
pairs of suite full (`--methods best,auto`) and GPT 7B in frontier, all four on TPU
predicted to gain 4 % and more gained 7 to 11 % once compiled, and those below 2 %
gained up to 1 %. On H100 four that were predicted to gain 7 to 12 % gained 4, 4, -2 and
-5 %, which no threshold tells apart. A tiny GPT predicted to be 6 % faster compiled 5 %
slower on v5e:2x4: XLA combined reductions of its gradients with those of two norms'
scales into one all-reduce of six arrays, which is not split again."""


NOT_POSSIBLE = (
    InfeasiblePlanError,
    StageError,
    MicrobatchError,
    ScheduleError,
    PinError,
)
"""Errors of programs that cannot be planned so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionOptions:
    """The decisions of a plan, as its user takes them; "auto" leaves one to the
    planner. `rhino_jax.options.UserOptions` describes them."""

    microbatches: Any = AUTO
    recompute: str = AUTO
    loops: str = AUTO
    grouped: str = AUTO
    stacks: str = AUTO
    attention: str = AS_WRITTEN
    offload: str = AS_WRITTEN
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


def step_s_of(plan: PlanData) -> float:
    """Return the predicted step of a plan in seconds."""
    return plan.predicted.step_time_s


Option = TypeVar("Option", bound=Hashable)
Result = TypeVar("Result")


@dataclass(eq=False)
class Decision(Generic[Option, Result]):
    """The options of a decision that were planned so far. The first is the simplest:
    another is taken where it is clearly faster.

    Attributes:
      make: plans an option.
      refusals: errors for which an option is left; others are raised.
      rank: the step of a result in seconds, and what decides between equal ones.
      min_gain: share of the first option's step that another must gain to be taken.
      deadline: `time.monotonic()` after which none but the first is planned.
      most: maximum number of options.
      first: the option that was planned first.
      plans: option → its result, for those that have one.
      left: option → the error for which it was left, `NotFaster` for one too slow.
    """

    make: Callable[[Option], Result]
    refusals: tuple[type[Exception], ...]
    rank: Callable[[Any], tuple[float, ...]] = lambda plan: (step_s_of(plan),)
    min_gain: float = MIN_GAIN
    deadline: float = math.inf
    most: float = math.inf
    first: Option | None = field(default=None, init=False)
    plans: dict[Option, Result] = field(default_factory=dict, init=False)
    left: dict[Option, Exception] = field(default_factory=dict, init=False)

    def plan(self, option: Option) -> Result | None:
        """Plan an option, unless that was done before; None where it is left, or where
        limits leave no room for it."""
        count = len(self.plans) + len(self.left)
        is_over = count >= self.most or time.monotonic() > self.deadline
        if option not in self.plans and option not in self.left:
            if count and is_over:
                return None
            self.first = option if self.first is None else self.first
            try:
                self.plans[option] = self.make(option)
            except Exception as error:
                if not isinstance(error, (NotFaster, *self.refusals)):
                    raise
                self.left[option] = error
        return self.plans.get(option)

    @property
    def best(self) -> Option | None:
        """The option with the shortest step, the first of equal ones."""
        return min(self.plans, key=lambda o: self.rank(self.plans[o]), default=None)

    def fastest(self) -> Result:
        """Return the result with the shortest step.

        Raises:
          Exception: of the option that was left last, where there is no result.
        """
        if self.best is None:
            raise [*self.left.values()][-1]
        return self.plans[self.best]

    @property
    def enough_s(self) -> float:
        """The seconds below which a step is clearly shorter than the first option's;
        infinite where that has none."""
        if self.first not in self.plans:
            return math.inf
        return (1 - self.min_gain) * self.rank(self.plans[self.first])[0]

    def taken(self) -> Result:
        """Return the fastest result, or that of the first option where it is hardly
        slower.

        Raises:
          Exception: of the option that was left last, where there is no result.
        """
        best = self.fastest()
        is_clear = self.rank(best)[0] < self.enough_s or math.isinf(self.enough_s)
        return best if is_clear or self.first is None else self.plans[self.first]

    def seconds(self, option: Option) -> float:
        """Plan an option; return its step in seconds, or a lower bound where it is
        left."""
        if (result := self.plan(option)) is not None:
            return self.rank(result)[0]
        return getattr(self.left.get(option), "step_s", math.inf)

    def text(self, option: Option) -> str:
        """Return the step, or say why there is no plan."""
        seconds = format_seconds(self.seconds(option))
        if option in self.plans:
            return seconds
        is_slow = isinstance(self.left.get(option), NotFaster)
        return f"at least {seconds}" if is_slow else "not possible"


def noted(plan: PlanData, *notes: str) -> PlanData:
    """Return a plan with further notes."""
    return replace(plan, notes=(*plan.notes, *notes))


def row_of(name: str, plan: PlanData, *, is_chosen: bool = False) -> Variant:
    """Return the row of a plan in the table of variants."""
    return Variant(name, step_s_of(plan), plan.predicted.peak_bytes, is_chosen)
