"""Solving an instance: reduce it, price its memory, then let CP-SAT finish it.

1. The problem is reduced without loss (`simplify`).
2. Memory gets prices, one per interval of a node, that rise where memory overflows and
   fall elsewhere; at given prices, messages and forest moves make a choice, which is
   taken back into the limit, improved there, and put together with the best so far.
3. CP-SAT takes the whole of a small core, hinted the best choice, and proves it
   best; of a large one, one neighbourhood after the other.

Source of 2: prices per node, moved by whether memory overflows while it is live, are
the contest winners' (Staudt, Blacher, "Soft Constraints, Strong Solutions", 2025).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rhino_jax.contest.check import Checked, check
from rhino_jax.contest.instance import Instance
from rhino_jax.optimize.bounds.messages import Messages
from rhino_jax.optimize.cpsat import Limits, count_cells, settle
from rhino_jax.optimize.errors import UnsatisfiedError
from rhino_jax.optimize.memory import Memory, build_memory
from rhino_jax.optimize.moves.fusion import fuse_moves
from rhino_jax.optimize.moves.moves import Moves
from rhino_jax.optimize.moves.neighbourhoods import search_neighbourhoods
from rhino_jax.optimize.moves.repair import improve, repair
from rhino_jax.optimize.presolve.reduction import Core
from rhino_jax.optimize.presolve.simplify import simplify


MOST_CELLS = 150_000
"""Edge variables up to which CP-SAT takes a core whole (about 20 µs and 5 KB
each)."""

PRICING_SHARE = {True: 0.08, False: 0.75}
"""Share of the time that prices have, where CP-SAT takes the core whole or not."""

FIRST_SWEEPS, SWEEPS, FOREST_MOVES = 10, 2, 4
"""Sweeps over all messages before prices; then sweeps and moves for each price."""

RATE, SLOWING = 2.0, 10
"""How strongly prices answer to memory at first, and after how many answers only half
as strongly."""

ROUNDING = 1e-9
"""Share of a bound that sums of floating-point numbers may be off by."""

NEARLY = 0.02
"""Share of the limit by which memory may overflow once prices move one by one."""

RAISE = 4.0
"""Factor by which all prices rise until memory nearly fits."""

REPAIRABLE = 0.3
"""Share of the limit beyond which a choice is not taken back into it."""

FUSE_S = 3.0
"""Seconds that CP-SAT has to put choices together; mostly it needs less."""

NEAR, FUSING_SHARE = 1.3, 0.5
"""Choices are put together where the worse is at most so many times the better, and
for at most this share of the time."""

Report = Callable[[float, int, float], None]
"""Called with the seconds so far, the objective and the bound."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The best choice that was found.

    Attributes:
      choices: a strategy of every node.
      checked: its objective and memory, recomputed by the checker.
      bound: no choice costs less.
      is_optimal: nothing better exists.
      num_nodes: of the instance, and of the reduced core.
    """

    choices: list[int]
    checked: Checked
    bound: int
    is_optimal: bool
    num_nodes: tuple[int, int]


def solve_instance(
    instance: Instance,
    *,
    deadline: float,
    workers: int = 2,
    seed: int = 0,
    report: Report = lambda seconds, objective, bound: None,
) -> Answer:
    """Minimise an instance.

    Args:
      instance: what to minimise.
      deadline: of `time.monotonic()`.
      workers: of CP-SAT.
      seed: of everything random.
      report: called with every better choice.
    Raises:
      UnsatisfiedError: nothing satisfies it, or nothing that does was found in time.
    """
    return _Run(instance, deadline, workers, seed, report).run()


class _Run:
    def __init__(
        self,
        instance: Instance,
        deadline: float,
        workers: int,
        seed: int,
        report: Report,
    ) -> None:
        self.instance, self.deadline, self.workers = instance, deadline, workers
        self.seed, self.report = seed, report
        self.started = time.monotonic()
        self.core: Core = simplify(instance.problem())
        self.memory: Memory = build_memory(self.core)
        self.moves = Moves.of(self.core, self.memory)
        self.rng = np.random.default_rng(seed)
        self.costs = np.where(
            np.isfinite(self.moves.costs), self.moves.costs, self.moves.forbidden
        )
        self.fusing_s = 0.0
        everything = range(len(self.core.costs))
        self.is_whole = count_cells(self.moves, everything) <= MOST_CELLS
        self.best: np.ndarray | None = None
        self.value, self.bound = math.inf, -math.inf

    def run(self) -> Answer:
        left = self.deadline - time.monotonic()
        self.price(time.monotonic() + PRICING_SHARE[self.is_whole] * left)
        if self.bound < self.value and self.is_whole:
            self._settle_whole()
        elif self.bound < self.value and self.best is not None:
            search_neighbourhoods(
                self.moves,
                self.best,
                self.offer,
                self.limits(),
            )
        if self.best is None:
            raise UnsatisfiedError(
                "`solve`: no choice that satisfies the instance was found in time.",
                numbers=f"{time.monotonic() - self.started:.1f} s, memory limit"
                f" {self.instance.limit}",
                fix="give it more time: --time-limit-s.",
            )
        return self._answer(self.best)

    def limits(self) -> Limits:
        """What is left for CP-SAT."""
        seconds = self.deadline - time.monotonic()
        return Limits(seconds=seconds, workers=self.workers, seed=self.seed)

    def _settle_whole(self) -> None:
        least = np.zeros(len(self.memory.first) - 1, dtype=int)
        found = settle(
            self.moves,
            least if self.best is None else self.best,
            range(len(least)),
            self.limits(),
        )
        if found.labels is not None:
            self.offer(found.labels)
        elif found.is_optimal:
            raise UnsatisfiedError(
                "`solve`: no choice satisfies the instance, which was proved.",
                numbers=f"{len(self.instance.costs)} nodes, memory limit"
                f" {self.instance.limit}",
                fix="raise usage_limit, or allow more pairs of strategies.",
            )
        self.bound = max(self.bound, self.value if found.is_optimal else found.bound)

    def offer(self, labels: np.ndarray) -> bool:
        """Take a choice that fits; True where it is the best yet."""
        value = self.moves.objective(labels)
        if value >= min(self.value, self.moves.forbidden):
            return False
        self.best, self.value = labels.copy(), value
        self.report(time.monotonic() - self.started, round(value), self.bound)
        return True

    def price(self, until: float) -> None:
        """Find choices that fit by pricing memory, until the time given; where CP-SAT
        will not take the core whole, until there is one."""
        limit = max(self.instance.limit, 1)
        messages = Messages(self.moves)
        labels = self._least_memory()
        for _ in range(FIRST_SWEEPS):
            bound = messages.round(self.costs)
            self.bound = max(self.bound, bound - ROUNDING * abs(bound))
            if time.monotonic() > until:
                break
        prices = np.full(len(self.memory.largest), max(self.bound, 1.0) / limit / 100)
        has_fitted, step = False, 0
        while True:
            priced = self.costs + self.memory.priced(prices)
            for _ in range(SWEEPS):
                messages.sweep(priced, 0)
                messages.sweep(priced, 1, labels)
            for _ in range(FOREST_MOVES):
                labels = self.moves.forest_move(priced, labels, self.rng)
            over = self.memory.profile(labels) - self.memory.room
            excess = over.max(initial=0.0) / limit
            self._take(labels, excess)
            now = time.monotonic()
            if not len(prices) or self.bound >= self.value:
                return
            if now > until and (
                self.best is not None or self.is_whole or now > self.deadline
            ):
                return
            has_fitted = has_fitted or excess <= NEARLY
            if not has_fitted:
                prices = prices * RAISE
                continue
            fill = 1 + self.memory.fullest(over) / limit
            prices = prices * np.clip(fill, 0.7, 1.5) ** (RATE / (1 + step / SLOWING))
            step += 1

    def _least_memory(self) -> np.ndarray:
        """A choice that holds little, so that one is there whatever comes; offered."""
        largest = self.memory.largest
        price = self.moves.forbidden / 10 / max(largest.sum(), 1.0)
        costs = self.costs + self.memory.priced(np.full(len(largest), price))
        labels = np.zeros(len(self.memory.first) - 1, dtype=int)
        for _ in range(FOREST_MOVES):
            labels = self.moves.forest_move(costs, labels, self.rng)
        over = self.memory.profile(labels) - self.memory.room
        self._take(labels, over.max(initial=0.0) / max(self.instance.limit, 1))
        return labels

    def _take(self, labels: np.ndarray, excess: float) -> None:
        """Offer a choice made at some prices, taken back into the limit, and what it
        gives together with the best so far."""
        if excess > REPAIRABLE:
            return
        fitting = labels if excess <= 0 else repair(self.moves, labels)
        if fitting is None:
            return
        before = self.best
        better = improve(self.moves, fitting)
        is_best = self.offer(better)
        begun = time.monotonic()
        is_near = self.moves.objective(better) < NEAR * self.value
        is_due = self.fusing_s < FUSING_SHARE * (begun - self.started)
        if self.is_whole or before is None or not (is_near and is_due):
            return
        assert self.best is not None
        fused = fuse_moves(
            self.moves,
            self.best,
            [before if is_best else better],
            replace(self.limits(), seconds=min(FUSE_S, self.deadline - begun)),
        )
        if fused is not None:
            self.offer(fused)
        self.fusing_s += time.monotonic() - begun

    def _answer(self, best: np.ndarray) -> Answer:
        chosen = {n: int(k) for n, k in zip(self.core.costs, best, strict=True)}
        choices = self.core.expand(chosen).tolist()
        checked = check(self.instance, choices)
        assert checked.fits, "the solver's choice does not hold up to the checker"
        bound = min(math.ceil(self.bound - 1e-6), checked.objective)
        sizes = len(self.instance.costs), len(self.core.costs)
        return Answer(choices, checked, bound, bound == checked.objective, sizes)
