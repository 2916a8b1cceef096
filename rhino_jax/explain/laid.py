"""Groups of a plan in stages laid out, and what is held to lay them out otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rhino_jax.ir.spec import Spec
from rhino_jax.passes.staged.group import GroupProgram
from rhino_jax.passes.staged.stacks import Unstacked
from rhino_jax.passes.staged.step import StagedStep, ValueKey
from rhino_jax.plan.pins.interior import ValuePin
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.records import Request


@dataclass(frozen=True, slots=True)
class GroupLayouts:
    """Layouts of values, to plan groups with.

    Attributes:
      inputs, outputs: of the step as its user wrote it, by position.
      handed: of what groups send and get.
      values: group → value of its program → pin.
    """

    inputs: Mapping[int, Spec] = field(default_factory=dict)
    outputs: Mapping[int, Spec] = field(default_factory=dict)
    handed: Mapping[ValueKey, Spec] = field(default_factory=dict)
    values: Mapping[int, Mapping[int, ValuePin]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Equal for equal layouts."""
        return repr((self.inputs, self.outputs, self.handed, self.values))


class LaidGroup(Protocol):
    """Of `planner.staging.groups.PlannedGroup`, what is read here."""

    @property
    def of(self) -> GroupProgram: ...
    @property
    def found(self) -> SearchResult: ...
    @property
    def specs(self) -> Mapping[ValueKey, Spec]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """All groups of a plan laid out.

    Attributes:
      run: what they are part of (`planner.staging.again.FittingGroups`); None where one
      does not
        fit.
      groups: each planned; empty where one does not fit.
      step_s: of the pipeline, by the clock.
      peaks: bytes of one device of each group, micro-batches in flight and all.
      sent: two groups → seconds a step of what passes between them.
      cannot: what does not fit.
    """

    run: Any
    groups: tuple[Any, ...]
    step_s: float
    peaks: tuple[int, ...]
    sent: Mapping[tuple[int, int], float]
    cannot: str = ""

    @classmethod
    def nothing(cls, cannot: str) -> Laid:
        """Nothing fits."""
        return cls(None, (), math.inf, (), {}, cannot)

    @property
    def rank(self) -> tuple[float, float, float]:
        """The best is the least: what no stage waits for counts by its seconds."""
        took = [g.found.step_s for g in self.groups]
        return self.step_s, sum(took) if took else math.inf, max(self.peaks, default=0)


class InStages(Protocol):
    """Of `planner.staging.again.SolvedStages`, what is read here."""

    @property
    def step(self) -> StagedStep: ...
    @property
    def of_step(self) -> Unstacked: ...
    @property
    def request(self) -> Request: ...
    @property
    def groups(self) -> Sequence[LaidGroup]: ...
    def laid(self) -> Laid: ...
    def held(
        self,
        held: GroupLayouts,
        level: str,
        known: Laid | None = None,
        *,
        is_kept: bool,
    ) -> Laid: ...
    def best(
        self, held: GroupLayouts, level: str, known: Laid | None = None
    ) -> Laid: ...
