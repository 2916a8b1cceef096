"""The decision whether more meshes are worth their time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from rhino_jax.plan.records import CUT_BY_CLOCK
from rhino_jax.planner.search.limits import LIMITS
from rhino_jax.planner.search.records import Request, SolvedMesh
from rhino_jax.solver.least_peak import least_possible


@dataclass(slots=True)
class MoreAxes:
    """Decide whether more meshes, and those of three and more axes, are worth trying.

    Attributes:
      left_s: remaining seconds that they may take.
      cells: number of axes → pairs of options of the largest folded problem.
      best: number of axes → the best objective of such a mesh, in seconds.
      left_out: reason → number of meshes left out.
      untimely: number of meshes, of any number of axes, for which no time was left.
      nothing_fits: whether memory is exceeded on any mesh of so many devices.
    """

    left_s: float
    cells: Counter[int] = field(default_factory=Counter)
    best: dict[int, float] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    untimely: int = 0
    nothing_fits: bool = False

    @classmethod
    def of(cls, request: Request) -> MoreAxes:
        """Return the decision's start, with the time that the request leaves it."""
        limit_s = request.time_limit_s
        share = LIMITS.meshes_share
        return cls(LIMITS.meshes_s if limit_s is None else share * limit_s)

    def met(self, num_axes: int, found: SolvedMesh) -> None:
        """Record a search on a mesh of `num_axes` axes."""
        edges = found.mesh_problem.folded.problem.edges
        cells = sum(e.table.size for e in edges)
        self.cells[num_axes] = max(self.cells[num_axes], cells)
        before = self.best.get(num_axes, math.inf)
        self.best[num_axes] = min(before, found.solution.objective)
        if found.solution.unfit is not None:
            problem = found.mesh_problem.model.problem
            divided = least_possible(problem, found.mesh_problem.devices)
            self.nothing_fits |= divided > problem.limit

    def allow(self, num_axes: int) -> bool:
        """Whether to try a mesh of `num_axes` axes; if so, deduct its time."""
        if self.nothing_fits:
            return False
        if num_axes <= 2:
            return True
        fewer = [s for n, s in self.best.items() if n < num_axes - 1]
        last = self.best.get(num_axes - 1, math.inf)
        if fewer and last > (1 - LIMITS.axis_gain) * min(fewer):
            why = f"the axis before gained less than {LIMITS.axis_gain:.0%}"
            self.left_out[why] += 1
            return False
        takes_s = LIMITS.another_axis_s * self.cells[num_axes - 1]
        if takes_s > self.left_s:
            self.left_out["the program is large"] += 1
            return False
        self.left_s -= takes_s
        return True

    def notes(self) -> list[str]:
        """Return notes on the meshes that were left out."""
        untimely = [
            f"{CUT_BY_CLOCK} was over before mesh shapes were compared:"
            f" {self.untimely}. Give mesh= to plan on one."
        ]
        return untimely * bool(self.untimely) + [
            f"mesh shapes of three or more axes that were not tried, because {why}:"
            f" {count}. Give mesh= to plan on one."
            for why, count in self.left_out.items()
        ]
