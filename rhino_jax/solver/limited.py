"""A core under its memory limit, and what a search knows of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from rhino_jax.solver.cpsat import CpSatLimits, count_cells, settle
from rhino_jax.solver.errors import UnsatisfiedError
from rhino_jax.solver.memory import build_memory
from rhino_jax.solver.moves.fusion import fuse_moves
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.moves.repair import improve, repair
from rhino_jax.solver.presolve.reduction import Core


MAX_CELLS = 150_000
"""Edge variables up to which CP-SAT takes a core whole (about 20 µs and 5 KB each)."""

MAX_PRICED_NODES, MAX_PRICED_CELLS = 5_000, 3_000_000
"""Nodes and cells of all edges up to which memory gets prices per time: they need a
hundred rounds of messages, of about 50 µs a node and 5 ns a cell."""

REPAIRABLE = 0.3
"""Share of the limit beyond which a choice is not taken back into it."""

FUSE_S = 3.0
"""Seconds that CP-SAT has to put choices together; mostly it needs less."""

NEAR, FUSING_SHARE = 1.3, 0.5
"""Choices are put together where the worse is at most so many times the better, and
for at most this share of the time."""

Report = Callable[[float, float, float], None]
"""Called with the seconds so far, the objective and the bound."""


class Limited:
    """A core under its memory limit, and what is known of it.

    Args:
      core: costs are whole numbers.
      deadline: of `time.monotonic()`.
      workers: of CP-SAT.
      seed: of everything random.
      report: called with every better choice.

    Attributes:
      moves, memory: of the core.
      costs: of every option; what is forbidden is dearer than any choice.
      rng: draws what is random.
      is_whole: whether CP-SAT can take the core whole.
      is_priced: whether memory gets prices per time.
      best, value: the best choice that fits, and what it costs.
      bound: no choice that fits costs less.
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
        """Whether something better may be there."""
        return self.bound < self.value

    def limits(self, until: float = math.inf) -> CpSatLimits:
        """What is left for CP-SAT."""
        seconds = min(until, self.deadline) - time.monotonic()
        return CpSatLimits(seconds=seconds, workers=self.workers, seed=self.seed)

    def prove(self, bound: float) -> None:
        """Take a bound in."""
        self.bound = max(self.bound, bound)

    def settle_whole(self) -> None:
        """Let CP-SAT take the core whole.

        Raises:
          UnsatisfiedError: nothing fits.
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
        """Take a choice that fits; True where it is the best yet."""
        value = self.moves.objective(labels)
        if value >= min(self.value, self.moves.forbidden):
            return False
        self.best, self.value = labels.copy(), value
        self.report(time.monotonic() - self.started, value, self.bound)
        return True

    def take(self, labels: np.ndarray) -> None:
        """Offer a choice made at some prices, taken back into the limit, and, where
        prices per time do not follow, what it gives together with the best so far."""
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
