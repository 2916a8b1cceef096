"""Layouts of the submeshes of a plan in stages, and constraints to plan them again."""

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
    """Layouts to which values are fixed when submeshes are planned again.

    Attributes:
      inputs, outputs: position in the step as the user wrote it → layout.
      handed: key of a value that stages send and receive → layout.
      values: submesh → value id in its program → pin.
    """

    inputs: Mapping[int, Spec] = field(default_factory=dict)
    outputs: Mapping[int, Spec] = field(default_factory=dict)
    handed: Mapping[ValueKey, Spec] = field(default_factory=dict)
    values: Mapping[int, Mapping[int, ValuePin]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Cache key, equal for equal layouts."""
        return repr((self.inputs, self.outputs, self.handed, self.values))


class LaidGroup(Protocol):
    """Interface of `planner.staging.groups.PlannedGroup` that explanations read."""

    @property
    def of(self) -> GroupProgram: ...
    @property
    def found(self) -> SearchResult: ...
    @property
    def specs(self) -> Mapping[ValueKey, Spec]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """All submeshes of a plan, planned.

    Attributes:
      run: the plan that contains them (`planner.staging.again.FittingGroups`); None if
        one does not fit.
      groups: the planned submeshes; empty if one does not fit.
      step_s: simulated seconds of the pipeline's step.
      peaks: peak bytes of one device of each submesh, with its micro-batches in flight.
      sent: (source, target) submesh → seconds of a step's transfers between them.
      cannot: which submesh does not fit; empty if all do.
    """

    run: Any
    groups: tuple[Any, ...]
    step_s: float
    peaks: tuple[int, ...]
    sent: Mapping[tuple[int, int], float]
    cannot: str = ""

    @classmethod
    def nothing(cls, cannot: str) -> Laid:
        """Return the result for layouts with which nothing fits."""
        return cls(None, (), math.inf, (), {}, cannot)

    @property
    def rank(self) -> tuple[float, float, float]:
        """Sort key, lowest best: the step, all stages' seconds, peak bytes."""
        took = [g.found.step_s for g in self.groups]
        return self.step_s, sum(took) if took else math.inf, max(self.peaks, default=0)


class InStages(Protocol):
    """Interface of `planner.staging.again.SolvedStages` that explanations read."""

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
