"""The optimisation problem: nodes with options, edges with pair costs.

    minimise   Σ_i cost_i[x_i] + Σ_(i,j) table_ij[x_i, x_j]
    such that  Σ (usages live at t) ≤ limit   at every time t

It is the problem of XLA's auto-sharding and of the ASPLOS/EuroSys 2025 contest on
intra-operator parallelism, with memory of edges too (resharded copies need memory).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from rhino_jax.errors import RhinoError
from rhino_jax.solver.lookups import Beside, Lookups, Spans


class UnsatisfiedError(RhinoError, RuntimeError):
    """The problem is infeasible, or no feasible assignment was found in time."""


Labels = np.ndarray
"""An assignment: one option per node, int64."""


class PairTable(NamedTuple):
    """Costs of an edge: `table[x_source, x_target]`, in the objective's unit."""

    source: int
    target: int
    table: np.ndarray


class NodeUsage(NamedTuple):
    """Memory of a node's options from `start` up to, not including, `stop`."""

    node: int
    usage: np.ndarray
    start: int
    stop: int

    @property
    def nodes(self) -> tuple[int, int]:
        """The node, twice."""
        return self.node, self.node


class EdgeUsage(NamedTuple):
    """Memory of pairs of options from `start` up to, not including, `stop`."""

    source: int
    target: int
    usage: np.ndarray
    start: int
    stop: int

    @property
    def nodes(self) -> tuple[int, int]:
        """Source and target."""
        return self.source, self.target


@dataclass(slots=True, eq=False)
class Problem:
    """A whole problem.

    Attributes:
      costs: by node, the cost of each option.
      edges: pair costs; several edges may join the same two nodes.
      node_usages, edge_usages: memory of nodes and of edges.
      limit: memory limit; infinite for none.
      end: upper bound of all times (exclusive).

    Changes after the first call of `objective` or `profile` have no effect.
    """

    costs: list[np.ndarray]
    edges: list[PairTable]
    node_usages: list[NodeUsage] = field(default_factory=list)
    edge_usages: list[EdgeUsage] = field(default_factory=list)
    limit: float = float("inf")
    end: int = 1
    _costs: Lookups | None = field(init=False, default=None)
    _held: Spans | None = field(init=False, default=None)

    def objective(self, labels: Sequence[int] | Labels) -> float:
        """Return the cost of an assignment, computed from the tables."""
        labels = np.asarray(labels, dtype=np.int64)
        paid = self._lookups().entries(labels)
        nodes = len(self.costs)
        return float(paid[:nodes].sum() + paid[nodes:].sum())

    def _lookups(self) -> Lookups:
        """Return the costs of nodes, then of edges."""
        if self._costs is None:
            nodes = range(len(self.costs))
            self._costs = Lookups.of(
                [*nodes, *(e.source for e in self.edges)],
                [*nodes, *(e.target for e in self.edges)],
                [*self.costs, *(e.table for e in self.edges)],
            )
        return self._costs

    def beside(self) -> Beside:
        """Return the costs of every option, given the other nodes' options."""
        sizes = np.array([len(c) for c in self.costs], dtype=np.int64)
        return Beside.of(self._lookups(), sizes)

    @property
    def usages(self) -> list[NodeUsage | EdgeUsage]:
        """All memory: of nodes, then of edges."""
        return [*self.node_usages, *self.edge_usages]

    def profile(self, labels: Sequence[int] | Labels) -> np.ndarray:
        """Return the memory at every time."""
        labels = np.asarray(labels, dtype=np.int64)
        return self._spans().profile(labels, self.end)

    def _spans(self) -> Spans:
        if self._held is None:
            self._held = Spans.of(
                [(*u.nodes, u.usage, u.start, u.stop) for u in self.usages]
            )
        return self._held

    def peak(self, labels: Sequence[int] | Labels) -> float:
        """Return the largest memory over time."""
        return float(self.profile(labels).max(initial=0.0))

    def peak_time(self, labels: Sequence[int] | Labels) -> int:
        """Return the first time of largest memory."""
        return int(self.profile(labels).argmax())

    def recharged(self, costs: list[np.ndarray], edges: list[PairTable]) -> Problem:
        """Return the problem with the same memory and other costs."""
        other = replace(self, costs=costs, edges=edges)
        other._held = self._spans()
        return other

    def within(self, limit: float) -> Problem:
        """Return the problem with another memory limit."""
        other = replace(self, limit=limit)
        other._costs, other._held = self._lookups(), self._spans()
        return other

    def priced(self, prices: Mapping[int, float]) -> Problem:
        """Return a Lagrangian relaxation: memory at the given times is added to the
        costs.

        Args:
          prices: time → multiplier, cost per unit of memory live then, ≥ 0.
        """
        costs, edges = list(self.costs), list(self.edges)
        rates = self._spans().rates(prices)
        # (Nodes, usage) of equal usages → (nodes, sum of their rates, usage).
        found: dict[tuple[object, ...], tuple[tuple[int, int], float, np.ndarray]] = {}
        for k in np.flatnonzero(rates).tolist():
            usage, nodes = self.usages[k].usage, self.usages[k].nodes
            _, rate, _ = found.get((nodes, id(usage)), (nodes, 0.0, usage))
            found[nodes, id(usage)] = nodes, rate + float(rates[k]), usage
        for (i, j), rate, usage in found.values():
            if usage.ndim == 1:
                costs[i] = costs[i] + rate * usage
            else:
                edges.append(PairTable(i, j, rate * usage))
        return Problem(costs, edges)
