"""The state of a search over a core under its memory limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from rhino_jax.solver.cpsat import CpSatLimits, count_cells, settle
from rhino_jax.solver.memory import build_memory
from rhino_jax.solver.moves.fusion import fuse_moves
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.moves.repair import improve, repair
from rhino_jax.solver.problem import UnsatisfiedError
from rhino_jax.solver.reduction import Core


MAX_CELLS = 150_000
"""Largest number of edge variables for CP-SAT on a whole core (about 20 µs and 5 KB
each)."""

MAX_PRICED_NODES, MAX_PRICED_CELLS = 5_000, 3_000_000
"""Largest number of nodes, and of cells of all edges, for memory multipliers per time:
these need a hundred rounds of messages, of about 50 µs per node and 5 ns per cell."""

REPAIRABLE = 0.3
"""Largest excess memory, as a share of the limit, that is repaired."""

FUSE_S = 3.0
"""Time limit of CP-SAT for combining assignments; mostly it needs less."""

NEAR, FUSING_SHARE = 1.3, 0.5
"""Assignments are combined if the worse costs at most NEAR times the better, and for at
most FUSING_SHARE of the time."""

Report = Callable[[float, float, float], None]
"""Called with (seconds so far, objective, bound)."""


class Limited:
    """A search over a core under its memory limit: best assignment and bound so far.

    Args:
      core: the core; costs are integers.
      deadline: deadline, as `time.monotonic()`.
      workers: threads of CP-SAT.
      seed: seed of all randomness.
      report: called with every better assignment.

    Attributes:
      moves, memory: costs and memory of the core.
      costs: cost of every option; forbidden ones cost more than any assignment.
      rng: random generator.
      is_whole: whether CP-SAT can solve the whole core.
      is_priced: whether memory gets multipliers per time.
      best, value: the best assignment that fits, and its cost.
      bound: lower bound on the cost of any assignment that fits.
    """

    def __init__(
        self, core: Core, deadline: float, workers: int, seed: int, report: Report
    ) -> None:
        self.started, self.deadline = time.monotonic(), deadline
        self.workers, self.seed, self.report = workers, seed, report
        self.memory = build_memory(core)
        self.moves = Moves.of(core, self.memory)
        self.rng = np.random.default_rng(seed)
        costs, forbidden = self.moves.costs, self.moves.forbidden
        self.costs = np.where(np.isfinite(costs), costs, forbidden)
        cells = count_cells(self.moves, range(len(core.costs)))
        self.is_whole = cells <= MAX_CELLS
        self.is_priced = (
            0 < len(self.memory.room)
            and len(core.costs) <= MAX_PRICED_NODES
            and cells <= MAX_PRICED_CELLS
        )
        self.best: np.ndarray | None = None
        self.value, self.bound = math.inf, -math.inf
        self._fusing_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a better assignment may exist."""
        return self.bound < self.value

    def limits(self, until: float = math.inf) -> CpSatLimits:
        """Return CP-SAT's limits in the remaining time."""
        seconds = min(until, self.deadline) - time.monotonic()
        return CpSatLimits(seconds=seconds, workers=self.workers, seed=self.seed)

    def prove(self, bound: float) -> None:
        """Record a lower bound."""
        self.bound = max(self.bound, bound)

    def settle_whole(self) -> None:
        """Solve the whole core with CP-SAT.

        Raises:
          UnsatisfiedError: infeasibility is proved.
        """
        nodes = range(len(self.memory.first) - 1)
        start = np.zeros(len(nodes), dtype=int) if self.best is None else self.best
        found = settle(self.moves, start, nodes, self.limits())
        if found.labels is not None:
            self.offer(found.labels)
        elif found.is_optimal:
            raise UnsatisfiedError(
                "`solve`: no choice satisfies the instance, which was proved.",
                numbers=f"{len(nodes)} nodes were left to choose",
                fix="raise the limit, or allow more pairs of options.",
            )
        self.prove(self.value if found.is_optimal else found.bound)

    def offer(self, labels: np.ndarray) -> bool:
        """Record an assignment that fits and return whether it is the best so far."""
        value = self.moves.objective(labels)
        if value >= min(self.value, self.moves.forbidden):
            return False
        self.best, self.value = labels.copy(), value
        self.report(time.monotonic() - self.started, value, self.bound)
        return True

    def take(self, labels: np.ndarray) -> None:
        """Repair, improve and record an assignment built at some multipliers.

        If no multipliers per time follow, it is also combined with the best one so far.
        """
        excess = self.memory.excess(labels)
        if excess > REPAIRABLE * self.memory.limit:
            return
        fitting = labels if excess <= 0 else repair(self.moves, labels)
        if fitting is None:
            return
        before = self.best
        better = improve(self.moves, fitting)
        is_best = self.offer(better)
        begun = time.monotonic()
        is_near = self.moves.objective(better) < NEAR * self.value
        is_due = self._fusing_s < FUSING_SHARE * (begun - self.started)
        if self.is_priced or before is None or not (is_near and is_due):
            return
        assert self.best is not None
        others = [before if is_best else better]
        limits = self.limits(begun + FUSE_S)
        fused = fuse_moves(self.moves, self.best, others, limits)
        if fused is not None:
            self.offer(fused)
        self._fusing_s += time.monotonic() - begun
