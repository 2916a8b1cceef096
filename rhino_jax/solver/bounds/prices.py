"""The best prices of memory, as far as the choices that were met can tell.

Every choice x bounds the Lagrangian dual from above: for all weights w in [0, 1] and
prices λ ≥ 0, q(w, λ) ≤ (1 - w)·a_x + w·b_x + Σ_t λ_t (m_x(t) - limit), where the larger
of a_x and b_x is its T (see `overlap`) and m_x its memory. The largest q that all of
them allow is a linear program. Its dual is a mixture of the choices, in shares that
add up to 1, which fits the limit on average; w and λ are the prices of its rows:

    minimise   z
    such that  z ≥ Σ_x share_x a_x,  z ≥ Σ_x share_x b_x
               Σ_x share_x m_x(t) ≤ limit   at every time t

Source: Kelley, "The cutting-plane method for solving convex programs", SIAM J. 8
(1960); Dantzig and Wolfe, "Decomposition principle for linear programs", OR 8 (1960).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from ortools.linear_solver import pywraplp


@dataclass(frozen=True, slots=True)
class TimePrices:
    """A weight of what can hide, and time → seconds per unit of memory then."""

    weight: float
    memory: Mapping[int, float] = field(default_factory=dict)

    def towards(self, other: TimePrices, share: float) -> TimePrices:
        """The prices that far on the way to others."""
        times = {**self.memory, **other.memory}
        memory = {
            t: (1 - share) * self.memory.get(t, 0.0) + share * other.memory.get(t, 0.0)
            for t in times
        }
        return TimePrices(
            (1 - share) * self.weight + share * other.weight,
            {t: price for t, price in memory.items() if price > 0},
        )

    def paid(self, limit: float) -> float:
        """What the limit costs."""
        return sum(self.memory.values()) * limit


class Mixture:
    """The linear program, over the choices that were added.

    Args:
      limit: of memory, the same at every time.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._ends: list[tuple[float, float]] = []
        self._held: list[np.ndarray] = []
        self._times: list[int] = []

    def add(self, ends: tuple[float, float], held: np.ndarray) -> None:
        """Take a choice in.

        Args:
          ends: what its cost is the larger of.
          held: memory at every time, in limits.
        """
        self._ends.append(ends)
        self._held.append(held)

    def solve(self) -> tuple[float, TimePrices, np.ndarray] | None:
        """The largest q that the choices allow, and where, and the choices' shares;
        None where no mixture of them fits."""
        unit = max(max(map(max, self._ends)), 1e-30)
        held = np.array(self._held)
        while True:
            found = self._solve(held, unit)
            if found is None:
                return None
            value, prices, shares = found
            mixed = shares @ held
            # At all other times the mixture fits, unasked.
            fullest = int(mixed.argmax())
            if mixed[fullest] <= 1 + 1e-6 or fullest in self._times:
                return value, prices, shares
            self._times.append(fullest)

    def _solve(
        self, held: np.ndarray, unit: float
    ) -> tuple[float, TimePrices, np.ndarray] | None:
        solver = pywraplp.Solver.CreateSolver("GLOP")
        worst = solver.NumVar(-solver.infinity(), solver.infinity(), "")
        shares = [solver.NumVar(0.0, 1.0, "") for _ in held]
        solver.Add(sum(shares) == 1)
        ends = [
            solver.Add(
                sum(s * (e[k] / unit) for s, e in zip(shares, self._ends, strict=True))
                <= worst
            )
            for k in (0, 1)
        ]
        rows = [
            solver.Add(
                sum(s * float(h) for s, h in zip(shares, held[:, t], strict=True)) <= 1
            )
            for t in self._times
        ]
        solver.Minimize(worst)
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        weight = min(max(-ends[1].dual_value(), 0.0), 1.0)
        paid = {
            t: -row.dual_value() * unit / self._limit
            for t, row in zip(self._times, rows, strict=True)
        }
        prices = TimePrices(weight, {t: p for t, p in paid.items() if p > 0})
        taken = np.array([max(s.solution_value(), 0.0) for s in shares])
        return float(solver.Objective().Value()) * unit, prices, taken
