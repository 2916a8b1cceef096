"""Several programs that share state, searched as one problem on one mesh.

The problem has the nodes of all programs; a shared array is produced by one node, whose
choice all of them read. Costs are weighted by the programs' weights. The programs run
one after the other: each has its own time in memory, during which the state that the
others need later is live as well.

The communication that compute hides is added up over all programs, which overestimates
it where one has collectives to hide and another the compute; the plans made of the
result are costed one by one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.shared import Slot, taken_with
from rhino_jax.planner.search.folding import first_choices, with_recipes
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import MeshAxes, MeshProblem, Request
from rhino_jax.recipes.recipes import recipes_for
from rhino_jax.solver.incumbents import RECIPE_EFFORTS, Effort, Report
from rhino_jax.solver.overlap import Overlap, Slack, Wait
from rhino_jax.solver.problem import EdgeUsage, Labels, NodeUsage, PairTable, Problem
from rhino_jax.solver.solve import solve_overlapped
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


@dataclass(frozen=True, slots=True)
class SharedSolution:
    """The layout of the inputs that are shared or stay allocated.

    Attributes:
      specs: for each member, input → spec.
      objective_s, bound_s: weighted sum of step times in seconds, and its lower bound.
      smallest_peak_bytes: the smallest peak of all choices visited.
      fits: whether any choice is within the budget.
    """

    specs: tuple[Mapping[int, Spec], ...]
    objective_s: float
    bound_s: float
    smallest_peak_bytes: float
    fits: bool


def search_layout(
    members: Sequence[Member],
    analyses: Sequence[ProgramAnalysis],
    shared: Sequence[Sequence[Slot]],
    mesh_axes: MeshAxes,
    effort: Effort,
    report: Report = lambda best, bound: None,
    *,
    is_brief: bool = False,
) -> SharedSolution:
    """Return the layout of shared state with the smallest weighted sum of steps.

    Args:
      members: the programs.
      analyses: their analyses.
      shared: for each shared array, its (program, input) slots, at least two.
      mesh_axes: (name, size), major first.
      effort: limits of the search.
      report: called with new best objectives and bounds, in seconds.
      is_brief: start from the recipes' first choices instead of searching the recipes.
    """
    problems = [
        build_mesh_problem(analysis, mesh_axes, member.request)
        for analysis, member in zip(analyses, members, strict=True)
    ]
    if is_brief:
        for i, p in enumerate(problems):
            every = [r for r in recipes_for(p.model.mesh) if p.book.allows(r)]
            names = (r.name for r in every)
            problems[i] = replace(
                p, recipes=dict(zip(names, first_choices(p), strict=False))
            )
    else:
        problems = [with_recipes(p, RECIPE_EFFORTS["fast"]) for p in problems]
    joint = Joint(members, problems, shared, *_join_nodes(problems, shared))
    found = solve_overlapped(joint.overlap, joint.starts(), effort, report)
    if found.labels is None:
        nothing: tuple[dict[int, Spec], ...] = ({},) * len(members)
        peak = found.smallest_peak
        return SharedSolution(nothing, math.inf, found.bound, peak, fits=False)
    return SharedSolution(
        tuple(joint.specs_of(m, found.labels) for m in range(len(members))),
        found.objective,
        found.bound,
        found.smallest_peak,
        fits=True,
    )


@dataclass(frozen=True, eq=False)
class Joint:
    """The joint problem of all programs: their costs and memory, added up.

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

    @cached_property
    def overlap(self) -> Overlap:
        """The joint problem, with the communication that compute can hide."""
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
            memo, node, picks = Memo(), self.node[m], self.picks[m]
            for source, target, table in d.folded.problem.edges:
                part = _part(memo, table, picks[source], picks[target])
                scaled = memo.scaled(part, self.members[m].weight)
                ends = int(node[source]), int(node[target])
                problem.edges.append(PairTable(*ends, scaled))
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
        for k, d in enumerate(self.mesh_problem):
            if k == m:
                continue
            # The inputs that member k needs later, except those that m takes too.
            later = self.members[k].stays - taken_with(self.shared, k, m)
            nodes = {n for slot, n in input_nodes(d).items() if slot in later}
            for one in d.overlap.problem.node_usages:
                if one.node in nodes:
                    c = int(d.symmetry.orbits[one.node])
                    usage = one.usage[self.picks[k][c]]
                    at = int(self.node[k][c]), usage, start, start + folded.end
                    problem.node_usages.append(NodeUsage(*at))

    def specs_of(self, member: int, labels: Labels) -> dict[int, Spec]:
        """Return a member's specs of the inputs that are shared or stay allocated."""
        own = [
            pick[labels[j]]
            for pick, j in zip(self.picks[member], self.node[member], strict=True)
        ]
        of, told = self.mesh_problem[member], {*self.members[member].stays}
        told |= {slot for place in self.shared for k, slot in place if k == member}
        chosen = of.symmetry.expand(np.array(own, dtype=np.int64))
        return {
            slot: of.model.spec(of.model.graph.nodes[n].ports[0], int(chosen[n]))
            for slot, n in input_nodes(of).items()
            if slot in told
        }

    def starts(self) -> list[Labels]:
        """Return the recipes that all programs have as joint labels; the first program
        decides the shared arrays."""
        found = []
        for name in self.mesh_problem[0].recipes:
            every = [d.recipes.get(name) for d in self.mesh_problem]
            known = [x for x in every if x is not None]
            if len(known) == len(every):
                found.append(self.join(known))
        return found

    def join(self, labels: Sequence[Labels]) -> Labels:
        """Join the members' own labels; the first member decides the shared arrays."""
        joint = np.zeros(len(self.overlap.problem.costs), dtype=np.int64)
        for member in reversed(range(len(self.mesh_problem))):
            own = self.mesh_problem[member].symmetry.contract(labels[member])
            for c, (pick, j) in enumerate(
                zip(self.picks[member], self.node[member], strict=True)
            ):
                at = np.flatnonzero(pick == own[c])
                if len(at):
                    joint[j] = at[0]
        return joint


def _join_nodes(
    mesh_problem: Sequence[MeshProblem], shared: Sequence[Sequence[Slot]]
) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Return every orbit's joint node, and its own option of every joint option."""
    first = [0, *itertools.accumulate(len(d.symmetry.first) for d in mesh_problem)]
    root = np.arange(first[-1])
    inputs = [input_nodes(d) for d in mesh_problem]
    for place in shared:
        ends = [
            first[m] + int(mesh_problem[m].symmetry.orbits[inputs[m][slot]])
            for m, slot in place
            if slot in inputs[m]
        ]
        same = {int(root[end]) for end in ends}
        if same:
            root[np.isin(root, list(same))] = min(same)
    _, joint = np.unique(root, return_inverse=True)
    node = [joint[a:b] for a, b in itertools.pairwise(first)]
    common: dict[int, list[Spec]] = {}
    sizes = np.bincount(joint)
    for m, d in enumerate(mesh_problem):
        for c, j in enumerate(node[m].tolist()):
            if sizes[j] > 1:
                own = _specs(d, c)
                common[j] = [s for s in common.get(j, own) if s in set(own)]
    picks = []
    for m, d in enumerate(mesh_problem):
        mine = []
        for c, j in enumerate(node[m].tolist()):
            count = len(d.folded.problem.costs[c])
            if j not in common:
                mine.append(np.arange(count))
                continue
            own = _specs(d, c)
            mine.append(np.array([own.index(s) for s in common[j]], dtype=np.int64))
        picks.append(mine)
    return node, picks


def _specs(mesh_problem: MeshProblem, orbit: int) -> list[Spec]:
    """Return the spec of each option of an orbit of inputs."""
    options = mesh_problem.model.options[int(mesh_problem.symmetry.first[orbit])]
    return [s.results[0] for s in options.strategies]
