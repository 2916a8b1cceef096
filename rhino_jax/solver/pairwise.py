"""The problem without memory: reduction, forest moves, bounds by messages.

Cores with small tables are solved by elimination. Otherwise, known assignments are
improved by moves, a random forest of nodes at a time; the results are combined by
elimination or CP-SAT.
Messages between nodes give a lower bound and more assignments. If a small problem is
still open, CP-SAT solves it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.solver.bounds.messages import Messages, SavedMessages
from rhino_jax.solver.cpsat import CpSatLimits, count_cells, settle
from rhino_jax.solver.incumbents import Effort
from rhino_jax.solver.memory import build_memory
from rhino_jax.solver.moves.fusion import eliminate, fuse_moves
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.parameters import CPSAT, FUSION, PAIRWISE
from rhino_jax.solver.problem import Labels, Problem
from rhino_jax.solver.reduction import Core, reduce


@dataclass(frozen=True, slots=True, eq=False)
class PairwiseSolution:
    """The solution of a problem without memory.

    Attributes:
      labels: the best assignment, one option per node.
      value: cost of the best assignment.
      bound: lower bound on the cost of any assignment.
      variables: edge variables of CP-SAT's largest model.
      nodes: nodes of the reduced problem.
      messages, unit: the last messages, and their unit of cost; None without messages.
    """

    labels: Labels
    value: float
    bound: float
    variables: int
    nodes: int
    messages: SavedMessages | None = None
    unit: float = 1.0


def solve_pairwise(
    problem: Problem,
    starts: Sequence[Labels],
    effort: Effort,
    before: PairwiseSolution | None = None,
) -> PairwiseSolution:
    """Minimise a problem, ignoring its memory.

    Args:
      problem: the problem; move its memory to the objective first (`Problem.priced`).
      starts: known assignments.
      effort: limits on the search's work.
      before: solution of the same problem at other costs or multipliers, whose messages
        are reused.
    """
    return solve_reduced(reduce(problem), starts, effort, before)


def solve_reduced(
    core: Core,
    starts: Sequence[Labels],
    effort: Effort,
    before: PairwiseSolution | None = None,
) -> PairwiseSolution:
    """Minimise a reduced problem.

    Args:
      core: core of a single problem.
      starts: known assignments of all nodes, restricted to those of the core.
      effort: limits on the search's work.
      before: as in `solve_pairwise`.
    """
    order, rest = list(core.costs), float(core.constant)
    if not order:
        return PairwiseSolution(core.expand({}), rest, rest, 0, 0)
    search = _PairwiseSearch(core, order, [s[order] for s in starts], effort)
    search.run(before)
    chosen = dict(zip(order, search.best.tolist(), strict=True))
    return PairwiseSolution(
        core.expand(chosen),
        search.value * search.unit + rest,
        min(search.bound, search.value) * search.unit + rest,
        search.variables,
        len(order),
        None if search.messages is None else search.messages.saved,
        search.unit,
    )


class _PairwiseSearch:
    """The search over a core, in units in which a known assignment costs `units`."""

    def __init__(
        self,
        core: Core,
        order: list[int],
        known: Sequence[np.ndarray],
        effort: Effort,
    ) -> None:
        self.moves = Moves.of(core, build_memory(core))
        first = np.array([int(np.argmin(core.costs[i])) for i in order])
        starts = [*sorted(known, key=self.moves.objective), first]
        self.starts = starts[: effort.max_starts]
        scale = min(map(self.moves.objective, self.starts))
        self.unit = self.moves.unit(scale)
        self.moves.divide(self.unit)
        self.rest = float(core.constant) / self.unit
        self.messages: Messages | None = None
        self.effort = effort
        self.rng = np.random.default_rng(effort.seed)
        self.best, self.value, self.bound = self.starts[0], np.inf, -np.inf
        self.met: list[tuple[float, np.ndarray]] = []
        self.variables = 0

    def run(self, before: PairwiseSolution | None) -> None:
        if self.eliminate():
            return
        for start in self.starts:
            self.climb(start)
            if not self.is_worth(self.value):
                return
            if self.is_over():
                break
        if self.effort.fuses_early or not self.effort.max_rounds:
            self.put_together()
        if self.effort.max_rounds:
            self.messages = messages = Messages(self.moves)
            saved = None if before is None else before.messages
            if before is not None and saved is not None:
                messages.start_from(saved, before.unit / self.unit)
            self.pass_messages(messages)
            if saved and self.effort.deterministic_s and self.is_open(self.effort.near):
                # Messages that have converged give few assignments: new ones give more.
                self.pass_messages(Messages(self.moves))
        if self.is_cut_off:
            return
        if self.is_open(self.effort.near):
            self.put_together()
        if self.is_open() and self.effort.deterministic_s:
            self.close()

    def eliminate(self) -> bool:
        """Solve the core exactly by elimination, if its tables are small enough."""
        sizes = np.diff(self.moves.memory.first).tolist()
        every = {n: np.arange(size) for n, size in enumerate(sizes)}
        found = eliminate(self.moves, self.best, every)
        if found is None:
            return False
        self.offer(found)
        self.bound = self.value
        return True

    def is_open(self, share: float = PAIRWISE.optimal_gap) -> bool:
        """Whether the relative gap exceeds `share`, and time is left."""
        gap = self.value - self.bound
        return gap > share * (self.value + self.rest) and not self.is_over()

    @property
    def is_cut_off(self) -> bool:
        """Whether every assignment is proved to cost more than the cutoff."""
        return (self.bound + self.rest) * self.unit > self.effort.cutoff_s

    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.effort.deadline

    def is_worth(self, value: float) -> bool:
        """Whether to search from an assignment of this cost."""
        return (value + self.rest) * self.unit <= self.effort.worth_s

    def climb(self, labels: np.ndarray) -> None:
        """Improve an assignment by forest moves until they gain nothing."""
        costs, stale = self.moves.costs, 0
        value = self.moves.objective(labels)
        while stale < (PAIRWISE.stale_moves if self.is_worth(value) else 1):
            moved = self.moves.forest_move(costs, labels, self.rng)
            gained = self.moves.objective(moved)
            least = PAIRWISE.optimal_gap / 10 * abs(value)
            stale = 0 if gained < value - least else stale + 1
            if gained < value:
                labels, value = moved, gained
            if self.is_over():
                break
        self.offer(labels)

    def offer(self, labels: np.ndarray) -> None:
        """Record an assignment."""
        value = self.moves.objective(labels)
        self.met.append((value, labels))
        if value < self.value:
            self.best, self.value = labels, value

    def pass_messages(self, messages: Messages) -> None:
        """Raise the bound, and improve assignments that messages give."""
        bounds, due = [-np.inf], PAIRWISE.first_climb
        for k in range(1, self.effort.max_rounds + 1):
            labels = np.zeros(len(self.best), dtype=int) if k >= due else None
            bounds.append(messages.round(self.moves.costs, labels))
            self.bound = max(self.bound, bounds[-1])
            # A round that was undone gives a bad assignment, too.
            if labels is not None and bounds[-1] > bounds[-2]:
                self.climb(labels)
                due = k + PAIRWISE.rounds_per_climb
            if self.is_cut_off or not self.is_open(self.effort.near):
                break
            least = PAIRWISE.stalled_share * (self.value - self.bound)
            before = bounds[-1 - PAIRWISE.stalled_rounds :][0]
            if k > PAIRWISE.stalled_rounds and bounds[-1] - before < least:
                break

    def put_together(self) -> None:
        """Combine the best assignment with others by CP-SAT."""
        limits = self.limits()
        for _ in range(self.effort.max_fusions):
            if self.is_over():
                break
            near = sorted(self.met, key=lambda m: m[0])[: FUSION.most_met]
            others = [
                labels for value, labels in near if value < FUSION.near * self.value
            ]
            before = self.value
            fused = fuse_moves(self.moves, self.best, others, limits)
            if fused is None or not self.is_open():
                break
            self.climb(fused)
            if self.value > before * (1 - 10 * PAIRWISE.optimal_gap):
                break

    def close(self) -> None:
        """Solve the whole core with CP-SAT if it is small enough."""
        everything = range(len(self.best))
        cells = count_cells(self.moves, everything)
        if cells * CPSAT.cell_deterministic_s > CPSAT.deterministic_s:
            return
        self.variables = cells
        found = settle(self.moves, self.best, everything, self.limits())
        if found.labels is not None:
            self.offer(found.labels)
        # CP-SAT's costs are integers: its optimum is exact to one part in a million.
        proved = self.value * (1 - 1e-6) if found.is_optimal else found.bound
        self.bound = max(self.bound, min(proved, self.value))

    def limits(self) -> CpSatLimits:
        left = min(CPSAT.longest_s, self.effort.deadline - time.monotonic())
        return CpSatLimits(
            seconds=max(0.1, left),
            deterministic_s=CPSAT.deterministic_s,
            seed=self.effort.seed,
        )
