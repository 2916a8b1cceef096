"""Several programs that share state, searched as one problem on one mesh.

The problem has the nodes of all programs; what makes a shared array is one node, whose
choice all of them read. Costs count by the programs' weights. One program runs after
the other: each has its own time in memory, during which what the others need later is
held as well.

What hides behind compute is added up over all programs, which promises too much where
one has collectives to hide and another the compute; plans that are made of the result
are priced each by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.shared import Slot, taken_with
from rhino_jax.search.draw import draw, with_recipes
from rhino_jax.search.graph import NodeKind
from rhino_jax.search.makes import Makes
from rhino_jax.search.overlap import Overlap
from rhino_jax.search.pool import RECIPE_EFFORTS, Effort, Report
from rhino_jax.search.problem import EdgeUsage, Labels, NodeUsage, PairTable, Problem
from rhino_jax.search.records import Drawn, Request
from rhino_jax.search.slack import Slack
from rhino_jax.search.solve import solve_overlapped
from rhino_jax.search.study import Study


@dataclass(frozen=True, slots=True)
class Member:
    """One of the programs.

    Attributes:
      program: what is planned.
      request: what is asked for; the budget is the same for all.
      weight: how often it runs, beside the others.
      stays: inputs that stay in memory while the others run.
    """

    program: Program
    request: Request
    weight: float
    stays: frozenset[int]


@dataclass(frozen=True, slots=True)
class Layout:
    """What was found for the inputs that are shared or stay.

    Attributes:
      specs: of every member, input → spec.
      objective_s, bound_s: weighted sum of steps, and what it is at least.
      smallest_peak_bytes: of all choices that were met.
      fits: whether any is within the budget.
    """

    specs: tuple[Mapping[int, Spec], ...]
    objective_s: float
    bound_s: float
    smallest_peak_bytes: float
    fits: bool


def search_layout(
    members: Sequence[Member],
    studies: Sequence[Study],
    shared: Sequence[Sequence[Slot]],
    mesh_axes: Sequence[tuple[str, int]],
    effort: Effort,
    report: Report = lambda best, bound: None,
) -> Layout:
    """The layout of shared state that makes the weighted sum of all steps least.

    Args:
      members: the programs.
      studies: of them.
      shared: inputs that are one array, at least two each.
      mesh_axes: (name, size), major first.
      effort: limits of the search.
      report: called with new best objectives and bounds, in seconds.
    """
    drawn = [
        with_recipes(draw(study, mesh_axes, m.request), RECIPE_EFFORTS["fast"])
        for study, m in zip(studies, members, strict=True)
    ]
    joint = Joint.of(members, drawn, shared)
    found = solve_overlapped(joint.overlap, joint.starts(), effort, report)
    if found.labels is None:
        nothing: tuple[dict[int, Spec], ...] = ({},) * len(members)
        peak = found.smallest_peak
        return Layout(nothing, math.inf, found.bound, peak, fits=False)
    return Layout(
        tuple(joint.specs_of(m, found.labels) for m in range(len(members))),
        found.objective,
        found.bound,
        found.smallest_peak,
        fits=True,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """The problem of all programs.

    Attributes:
      drawn: each by itself.
      told: of every member, inputs whose specs are wanted.
      node: of every member, [classes], the joint node.
      picks: of every member and class, [options of the joint node], its own option.
      overlap: the problem, and what of it can hide.
    """

    drawn: Sequence[Drawn]
    told: Sequence[frozenset[int]]
    node: Sequence[np.ndarray]
    picks: Sequence[Sequence[np.ndarray]]
    overlap: Overlap

    @classmethod
    def of(
        cls,
        members: Sequence[Member],
        drawn: Sequence[Drawn],
        shared: Sequence[Sequence[Slot]],
    ) -> Joint:
        node, picks = _join_nodes(drawn, shared)
        overlap = _Adding(members, drawn, shared, node, picks).overlap()
        told = [
            members[m].stays | {slot for place in shared for k, slot in place if k == m}
            for m in range(len(members))
        ]
        return cls(drawn, told, node, picks, overlap)

    def labels_of(self, member: int, labels: Labels) -> Labels:
        """A member's choice of all of its nodes."""
        own = [
            pick[labels[j]]
            for pick, j in zip(self.picks[member], self.node[member], strict=True)
        ]
        return self.drawn[member].folding.expand(np.array(own, dtype=np.int64))

    def specs_of(self, member: int, labels: Labels) -> dict[int, Spec]:
        model, chosen = self.drawn[member].model, self.labels_of(member, labels)
        return {
            slot: model.spec(model.graph.nodes[n].ports[0], int(chosen[n]))
            for slot, n in _input_nodes(self.drawn[member]).items()
            if slot in self.told[member]
        }

    def starts(self) -> list[Labels]:
        """The recipes that all programs have; shared arrays as the first has them."""
        names = [n for n, x in self.drawn[0].recipes.items() if x is not None]
        found = []
        for name in names:
            every = [d.recipes.get(name) for d in self.drawn]
            known = [x for x in every if x is not None]
            if len(known) == len(every):
                found.append(self.join(known))
        return found

    def join(self, labels: Sequence[Labels]) -> Labels:
        """One choice of the members' own; the first member decides what is shared."""
        joint = np.zeros(len(self.overlap.problem.costs), dtype=np.int64)
        for member in reversed(range(len(self.drawn))):
            own = self.drawn[member].folding.contract(labels[member])
            for c, (pick, j) in enumerate(
                zip(self.picks[member], self.node[member], strict=True)
            ):
                at = np.flatnonzero(pick == own[c])
                if len(at):
                    joint[j] = at[0]
        return joint


def _input_nodes(drawn: Drawn) -> dict[int, int]:
    """Input → node; scalars have none."""
    nodes = drawn.model.graph.nodes
    return {n.slot: n.id for n in nodes if n.kind is NodeKind.INPUT}


def _join_nodes(
    drawn: Sequence[Drawn], shared: Sequence[Sequence[Slot]]
) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Joint nodes of all classes, and which of its own options each class takes."""
    first = [0, *itertools.accumulate(len(d.folding.first) for d in drawn)]
    root = np.arange(first[-1])
    inputs = [_input_nodes(d) for d in drawn]
    for place in shared:
        ends = [
            first[m] + int(drawn[m].folding.classes[inputs[m][slot]])
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
    for m, d in enumerate(drawn):
        for c, j in enumerate(node[m].tolist()):
            if sizes[j] > 1:
                own = _specs(d, c)
                common[j] = [s for s in common.get(j, own) if s in set(own)]
    picks = []
    for m, d in enumerate(drawn):
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


def _specs(drawn: Drawn, of_class: int) -> list[Spec]:
    """Of a class of inputs, the spec of each option."""
    options = drawn.model.options[int(drawn.folding.first[of_class])]
    return [s.results[0] for s in options.strategies]


@dataclass(frozen=True, slots=True, eq=False)
class _Adding:
    """Adds the programs' costs and memory up."""

    members: Sequence[Member]
    drawn: Sequence[Drawn]
    shared: Sequence[Sequence[Slot]]
    node: Sequence[np.ndarray]
    picks: Sequence[Sequence[np.ndarray]]

    def overlap(self) -> Overlap:
        count = 1 + max(int(n.max(initial=-1)) for n in self.node)
        problem = Problem(
            self._of_nodes(count, [d.folded.problem.costs for d in self.drawn]),
            [],
            limit=min(m.request.memory_budget_bytes for m in self.members),
            end=sum(d.folded.problem.end for d in self.drawn),
        )
        compute = self._of_nodes(count, [d.folded.compute.costs for d in self.drawn])
        has_slack = np.ones(count, dtype=bool)
        slack_edges: list[bool] = []
        start = 0
        for m, d in enumerate(self.drawn):
            np.logical_and.at(has_slack, self.node[m], d.folded.slack.nodes)
            slack_edges += d.folded.slack.edges
            self._add_edges(problem, m)
            self._add_memory(problem, m, start)
            start += d.folded.problem.end
        any_one = self.drawn[0].folded
        return Overlap.of(
            problem,
            compute,
            Slack(tuple(has_slack.tolist()), tuple(slack_edges)),
            share=any_one.share,
            hidable_share=any_one.hidable_share,
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
        makes, weight = Makes(), self.members[m].weight
        node, picks = self.node[m], self.picks[m]
        for source, target, table in self.drawn[m].folded.problem.edges:
            part = _part(makes, table, picks[source], picks[target])
            scaled = makes.scaled(part, weight)
            problem.edges.append(
                PairTable(int(node[source]), int(node[target]), scaled)
            )

    def _add_memory(self, problem: Problem, m: int, start: int) -> None:
        folded, node, picks = self.drawn[m].folded.problem, self.node[m], self.picks[m]
        makes = Makes()
        for one in folded.node_usages:
            usage = makes.make(np.take, one.usage, picks[one.node])
            problem.node_usages.append(
                NodeUsage(
                    int(node[one.node]), usage, start + one.start, start + one.stop
                )
            )
        for pair in folded.edge_usages:
            usage = _part(makes, pair.usage, picks[pair.source], picks[pair.target])
            ends = int(node[pair.source]), int(node[pair.target])
            times = start + pair.start, start + pair.stop
            if ends[0] == ends[1]:
                problem.node_usages.append(
                    NodeUsage(ends[0], np.diagonal(usage), *times)
                )
            else:
                problem.edge_usages.append(EdgeUsage(*ends, usage, *times))
        for k in range(len(self.drawn)):
            if k != m:
                self._hold(problem, k, m, start, start + folded.end)

    def _hold(self, problem: Problem, k: int, m: int, start: int, stop: int) -> None:
        """What member k needs later stays while m runs, unless m takes it too."""
        taken = taken_with(self.shared, k, m)
        d, inputs = self.drawn[k], _input_nodes(self.drawn[k])
        nodes = {n for s, n in inputs.items() if s in self.members[k].stays - taken}
        for one in d.overlap.problem.node_usages:
            if one.node in nodes:
                c = int(d.folding.classes[one.node])
                usage = one.usage[self.picks[k][c]]
                held = NodeUsage(int(self.node[k][c]), usage, start, stop)
                problem.node_usages.append(held)


def _part(
    makes: Makes, table: np.ndarray, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """The rows and columns of a table that are picked; itself where all are."""
    if table.shape == (len(rows), len(columns)):
        is_all = (rows == np.arange(len(rows))).all()
        if is_all and (columns == np.arange(len(columns))).all():
            return table
    return makes.make(_picked, table, rows, columns)


def _picked(table: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return table[rows][:, columns]
