"""The best Lagrange multipliers of memory, as far as known assignments determine them.

Every assignment x bounds the Lagrangian dual from above: for all weights w in [0, 1]
and multipliers λ ≥ 0, q(w, λ) ≤ (1 - w)·a_x + w·b_x + Σ_t λ_t (m_x(t) - limit), where
T = max(a_x, b_x) (see `overlap`) and m_x is its memory. The largest q that all of them
allow is a linear program (the master problem). Its dual is a convex combination of the
assignments that fits the limit on average; w and λ are the duals of its rows:

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
    """Lagrange multipliers.

    Attributes:
      weight: weight of hidable time, w (see `overlap`).
      memory: time → multiplier, in seconds per unit of memory live then.
    """

    weight: float
    memory: Mapping[int, float] = field(default_factory=dict)

    def towards(self, other: TimePrices, share: float) -> TimePrices:
        """Return the multipliers at a share of the way to others."""
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
        """Return the term of the limit in the Lagrangian, in seconds."""
        return sum(self.memory.values()) * limit


class Mixture:
    """The master problem: a linear program over the assignments added so far.

    Args:
      limit: memory limit, the same at every time.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._ends: list[tuple[float, float]] = []
        self._held: list[np.ndarray] = []
        self._times: list[int] = []

    def add(self, ends: tuple[float, float], held: np.ndarray) -> None:
        """Add an assignment.

        Args:
          ends: (a, b), of which its cost is the larger.
          held: memory at every time, divided by the limit.
        """
        self._ends.append(ends)
        self._held.append(held)

    def solve(self) -> tuple[float, TimePrices, np.ndarray] | None:
        """Return the largest dual value, its multipliers, and the assignments' shares.

        None if no convex combination of the assignments fits.
        """
        unit = max(max(map(max, self._ends)), 1e-30)
        held = np.array(self._held)
        while True:
            found = self._solve(held, unit)
            if found is None:
                return None
            value, prices, shares = found
            mixed = shares @ held
            # The combination fits at all other times, whose rows are not added.
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
