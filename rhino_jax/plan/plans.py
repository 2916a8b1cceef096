"""Plans of several programs that share state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rhino_jax.plan.plan import AnyPlan
from rhino_jax.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True, repr=False)
class Plans(Mapping[str, AnyPlan]):
    """Plans by program name, all on one mesh; see `rhino.plan_together`.

    Attributes:
      plans: program name → its plan.
      weights: program name → how often it runs, relative to the others.
      shared: for every array that several programs take, its (program name, tree path)
        in each.
      held_bytes: program name → bytes per device of the other programs' state that
        stays in memory while it runs and that it does not take itself.
      bound_s: lower bound on the weighted sum of step times, in seconds, assuming that
        collectives of one program do not hide behind compute of another.
      alone_s: program name → seconds of its step if planned alone on this mesh; None if
        not requested.
    """

    plans: Mapping[str, AnyPlan]
    weights: Mapping[str, float]
    shared: tuple[tuple[tuple[str, str], ...], ...]
    held_bytes: Mapping[str, int]
    bound_s: float
    alone_s: Mapping[str, float | None]

    def __getitem__(self, name: str) -> AnyPlan:
        return self.plans[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def mesh(self) -> Any:
        """The mesh of all programs."""
        return next(iter(self.plans.values())).mesh

    @property
    def mesh_axes(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of every mesh axis, major first."""
        return next(iter(self.plans.values())).mesh_axes

    @property
    def objective_s(self) -> float:
        """The weighted sum of predicted steps, in seconds."""
        return sum(
            self.weights[name] * plan.predicted.step_time_s
            for name, plan in self.plans.items()
        )

    @property
    def peak_bytes(self) -> int:
        """Largest peak of any program with the others' state, in bytes per device."""
        return max(
            plan.predicted.peak_bytes + self.held_bytes[name]
            for name, plan in self.plans.items()
        )

    def __repr__(self) -> str:
        axes = " × ".join(f"{name}={size}" for name, size in self.mesh_axes)
        lines = [
            f"Plans on {axes}: arrays shared {len(self.shared)},"
            f" {format_seconds(self.objective_s)} in all,"
            f" peak {format_bytes(self.peak_bytes)}"
        ]
        lines += [self._line(name, plan) for name, plan in self.plans.items()]
        return "\n".join(lines)

    def _line(self, name: str, plan: AnyPlan) -> str:
        alone = self.alone_s.get(name)
        beside = "" if alone is None else f" ({format_seconds(alone)} alone)"
        return (
            f"  {self.weights[name]:g} × {name}:"
            f" {format_seconds(plan.predicted.step_time_s)}{beside}, peak"
            f" {format_bytes(plan.predicted.peak_bytes)} and"
            f" {format_bytes(self.held_bytes[name])} held for the others"
        )
