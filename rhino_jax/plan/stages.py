"""The parts of a program that run on devices of their own; one, if it is not cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.records import Predicted


@dataclass(frozen=True, slots=True)
class Send:
    """A value that one stage sends to another.

    Attributes:
      to: the other's position among the stages.
      what: the value, for people: tree path, or op and source line.
      bytes: per step, of all devices together.
      seconds: predicted, per step.
    """

    to: int
    what: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """How a stage is laid out over its devices, and what that costs.

    Attributes:
      mesh_axes: (name, size) of the axes of its mesh, major first.
      devices: its devices, as positions among those of the plan's mesh, in the order of
        its own mesh.
      decisions: specs of the values that it makes and reads, by the program's ids.
      predicted: predicted cost of its part of one step.
      sends: what it sends to other stages.
      mesh: its JAX mesh, where the plan has one.
    """

    mesh_axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    decisions: Decisions
    predicted: Predicted
    sends: tuple[Send, ...] = ()
    mesh: Any = field(default=None, compare=False)

    @property
    def compute_s(self) -> float:
        """Predicted seconds of compute and memory traffic, per step."""
        return self.predicted.compute_s

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of one of its devices."""
        return self.predicted.peak_bytes
