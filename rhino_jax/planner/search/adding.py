"""The costs and the memory of several programs, added up into one problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.ir.program import Program
from rhino_jax.plan.shared import Slot, taken_with
from rhino_jax.planner.search.records import MeshProblem, Request
from rhino_jax.solver.overlap import Overlap, Slack, Wait
from rhino_jax.solver.problem import EdgeUsage, NodeUsage, PairTable, Problem
from rhino_jax.utils.cache import Memo


@dataclass(frozen=True, slots=True)
class Member:
    """A program that shares state with others.

    Attributes:
      program: the program to plan.
      request: the options of its search; the budget is the same for all programs.
      weight: how often it runs, relative to the others.
      stays: inputs that stay allocated while the others run.
    """

    program: Program
    request: Request
    weight: float
    stays: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class Adding:
    """Add up the costs and the memory of several programs.

    Attributes:
      members: the programs.
      mesh_problem: the problem of each, on the same mesh.
      shared: for each shared array, its (program, input) slots.
      node: for each program, the joint node of each orbit, [orbits].
      picks: for each program and orbit, its own option of each option of the joint
        node.
    """

    members: Sequence[Member]
    mesh_problem: Sequence[MeshProblem]
    shared: Sequence[Sequence[Slot]]
    node: Sequence[np.ndarray]
    picks: Sequence[Sequence[np.ndarray]]

    def overlap(self) -> Overlap:
        """Return the joint problem, with the communication that compute can hide."""
        count = 1 + max(int(n.max(initial=-1)) for n in self.node)
        problem = Problem(
            self._of_nodes(count, [d.folded.problem.costs for d in self.mesh_problem]),
            [],
            limit=min(m.request.memory_budget_bytes for m in self.members),
            end=sum(d.folded.problem.end for d in self.mesh_problem),
        )
        compute = self._of_nodes(
            count, [d.folded.compute.costs for d in self.mesh_problem]
        )
        waits = np.full(count, Wait.FREE, dtype=np.int64)
        slack_edges: list[int] = []
        start = 0
        for m, d in enumerate(self.mesh_problem):
            np.minimum.at(waits, self.node[m], d.folded.slack.nodes)
            slack_edges += d.folded.slack.edges
            self._add_edges(problem, m)
            self._add_memory(problem, m, start)
            start += d.folded.problem.end
        any_one = self.mesh_problem[0].folded
        return Overlap.of(
            problem,
            compute,
            Slack(tuple(waits.tolist()), tuple(slack_edges)),
            share=any_one.share,
            shares=any_one.shares,
        )

    def _of_nodes(
        self, count: int, every: Sequence[Sequence[np.ndarray]]
    ) -> list[np.ndarray]:
        found: list[np.ndarray | None] = [None] * count
        for m, costs in enumerate(every):
            weight = self.members[m].weight
            for cost, pick, j in zip(costs, self.picks[m], self.node[m], strict=True):
                before, mine = found[int(j)], weight * cost[pick]
                found[int(j)] = mine if before is None else before + mine
        return [x for x in found if x is not None]

    def _add_edges(self, problem: Problem, m: int) -> None:
        memo, weight = Memo(), self.members[m].weight
        node, picks = self.node[m], self.picks[m]
        for source, target, table in self.mesh_problem[m].folded.problem.edges:
            part = _part(memo, table, picks[source], picks[target])
            scaled = memo.scaled(part, weight)
            problem.edges.append(
                PairTable(int(node[source]), int(node[target]), scaled)
            )

    def _add_memory(self, problem: Problem, m: int, start: int) -> None:
        folded, node, picks = (
            self.mesh_problem[m].folded.problem,
            self.node[m],
            self.picks[m],
        )
        memo = Memo()
        for one in folded.node_usages:
            usage = memo.make(np.take, one.usage, picks[one.node])
            problem.node_usages.append(
                NodeUsage(
                    int(node[one.node]), usage, start + one.start, start + one.stop
                )
            )
        for pair in folded.edge_usages:
            usage = _part(memo, pair.usage, picks[pair.source], picks[pair.target])
            ends = int(node[pair.source]), int(node[pair.target])
            times = start + pair.start, start + pair.stop
            if ends[0] == ends[1]:
                problem.node_usages.append(
                    NodeUsage(ends[0], np.diagonal(usage), *times)
                )
            else:
                problem.edge_usages.append(EdgeUsage(*ends, usage, *times))
        for k in range(len(self.mesh_problem)):
            if k != m:
                self._hold(problem, k, m, start, start + folded.end)

    def _hold(self, problem: Problem, k: int, m: int, start: int, stop: int) -> None:
        """Add the inputs that member k needs later to the memory of member m's time,
        except those that m takes too."""
        taken = taken_with(self.shared, k, m)
        d, inputs = self.mesh_problem[k], input_nodes(self.mesh_problem[k])
        nodes = {n for s, n in inputs.items() if s in self.members[k].stays - taken}
        for one in d.overlap.problem.node_usages:
            if one.node in nodes:
                c = int(d.symmetry.orbits[one.node])
                usage = one.usage[self.picks[k][c]]
                held = NodeUsage(int(self.node[k][c]), usage, start, stop)
                problem.node_usages.append(held)


def _part(
    memo: Memo, table: np.ndarray, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """Return the picked rows and columns of a table; the table itself if all are."""
    if table.shape == (len(rows), len(columns)):
        is_all = (rows == np.arange(len(rows))).all()
        if is_all and (columns == np.arange(len(columns))).all():
            return table
    return memo.make(_picked, table, rows, columns)


def _picked(table: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return table[rows][:, columns]


def input_nodes(mesh_problem: MeshProblem) -> dict[int, int]:
    """Return input slot → node id; scalars have no node."""
    nodes = mesh_problem.model.graph.nodes
    return {n.slot: n.id for n in nodes if n.kind is NodeKind.INPUT}
