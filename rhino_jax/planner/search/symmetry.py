"""Folding by colour refinement: equivalent nodes share a choice.

Layers that are unrolled in the program, forward, backward and update, are many copies
of a few nodes. Every node starts with a colour that encodes its options and their
costs; in each round its new colour is a hash of its own, its edges' tables and its
neighbours' colours. After k rounds nodes of one colour have equal surroundings up to
distance k, and become one orbit with one choice. First and last layers differ only near
their borders, and every second layer folds with every second.

The number of rounds follows from the program. The first rounds tell nodes with
different functions apart, each fewer than the one before. After that, rounds only tell
apart how far a node is from where repeats begin and end, from more such places each
round. The first round that splits off no fewer orbits than the one before is the last.

The folded problem's objective and memory are those of the plan in which every node
takes its orbit's choice: the only approximation is that repeated nodes share a choice.

Source: Weisfeiler and Leman (1968); Grohe, Kersting, Mladenov, Selman, "Dimension
reduction via colour refinement", ESA 2014.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhino_jax.recipes.recipe_book import RecipeBook
from rhino_jax.solver.overlap import Overlap, Slack
from rhino_jax.solver.problem import (
    EdgeUsage,
    Labels,
    NodeUsage,
    PairTable,
    Problem,
)
from rhino_jax.utils.cache import Memo
from rhino_jax.utils.union_find import groups, number, number_objects, number_rows


@dataclass(frozen=True, slots=True, eq=False)
class Symmetry:
    """A partition of nodes into orbits that share a choice.

    Attributes:
      orbits: node → orbit.
      first: orbit → its first node.
    """

    orbits: np.ndarray
    first: np.ndarray

    @classmethod
    def none(cls, num_nodes: int) -> Symmetry:
        """Return the partition in which every node is its own orbit."""
        return cls(np.arange(num_nodes), np.arange(num_nodes))

    @property
    def is_identity(self) -> bool:
        """Whether every node is its own orbit."""
        return len(self.first) == len(self.orbits)

    def expand(self, labels: Labels) -> Labels:
        """Return the labels of all nodes, each that of its orbit."""
        return labels[self.orbits]

    def contract(self, labels: Labels) -> Labels:
        """Return the labels of all orbits, each that of its first node."""
        return labels[self.first]

    def overlap(self, whole: Overlap) -> Overlap:
        """Return the folded problem, with the communication that compute can hide.

        Args:
          whole: the problem of all nodes; those of an orbit have equal costs and slack.
        """
        problem, memo = whole.problem, Memo()
        counts = np.bincount(self.orbits).tolist()
        ends = self.orbits.tolist()
        edges = problem.edges
        alike = groups(
            number_rows(
                self.orbits[[e.source for e in edges]],
                self.orbits[[e.target for e in edges]],
                number_objects([e.table for e in edges]),
                np.array(whole.slack.edges, dtype=np.int64),
            )
        )
        alike.sort(key=lambda members: int(members[0]))
        pairs = [
            PairTable(
                ends[edges[k].source],
                ends[edges[k].target],
                len(members) * edges[k].table if len(members) > 1 else edges[k].table,
            )
            for members in alike
            for k in members[:1].tolist()
        ]
        firsts = self.first.tolist()
        folded = Problem(
            [memo.scaled(problem.costs[n], counts[c]) for c, n in enumerate(firsts)],
            pairs,
            limit=problem.limit,
            end=problem.end,
        )
        for use in problem.node_usages:
            mine = NodeUsage(ends[use.node], use.usage, use.start, use.stop)
            folded.node_usages.append(mine)
        diagonals: dict[int, np.ndarray] = {}
        for pair in problem.edge_usages:
            a, b = ends[pair.source], ends[pair.target]
            if a != b:
                both = EdgeUsage(a, b, pair.usage, pair.start, pair.stop)
                folded.edge_usages.append(both)
                continue
            # An edge within an orbit has the same label at both ends.
            key = id(pair.usage)
            if key not in diagonals:
                diagonals[key] = np.diagonal(pair.usage).copy()
            mine = NodeUsage(a, diagonals[key], pair.start, pair.stop)
            folded.node_usages.append(mine)
        slack = Slack(
            tuple(whole.slack.nodes[n] for n in firsts),
            tuple(whole.slack.edges[members[0]] for members in alike),
        )
        compute = [
            memo.scaled(whole.compute.costs[n], counts[c]) for c, n in enumerate(firsts)
        ]
        return Overlap.of(
            folded,
            compute,
            slack,
            share=whole.share,
            shares=whole.shares,
        )


def marks_of(book: RecipeBook) -> np.ndarray:
    """Return marks, [nodes], equal where options, their costs and the recipes' views of
    nodes are equal."""
    model = book.model
    nodes, values = model.graph.nodes, model.graph.program.values
    return number_rows(
        # Nodes with equal options share one object, without a dtype for border nodes.
        number_objects(model.options),
        number(values[node.value].dtype for node in nodes),
        np.array([node.count for node in nodes], dtype=np.int64),
        number_objects(book.views),
    )


def find_symmetry(overlap: Overlap, marks: np.ndarray) -> Symmetry:
    """Find the orbits of nodes that share a choice.

    Args:
      overlap: the problem of all nodes; equal tables are one array.
      marks: [nodes], equal numbers where nodes may be of one orbit: see `marks_of`.
    """
    own = number_rows(marks, np.array(overlap.slack.nodes))
    colours = _mix(own.astype(np.uint64))
    edges = overlap.problem.edges
    source = np.array([e.source for e in edges], dtype=np.int64)
    target = np.array([e.target for e in edges], dtype=np.int64)
    looks = number_objects([e.table for e in edges]), np.array(overlap.slack.edges)
    tables = number_rows(*looks).astype(np.uint64)
    memo, reads = _mix(2 * tables), _mix(2 * tables + 1)
    count, split = len(np.unique(colours)), len(marks)
    while True:
        around = np.zeros(len(colours), dtype=np.uint64)
        np.add.at(around, source, _mix(memo ^ colours[target]))
        np.add.at(around, target, _mix(reads ^ colours[source]))
        colours = _mix(_mix(colours) ^ around)
        _, first, orbits = np.unique(colours, return_index=True, return_inverse=True)
        before, split, count = split, len(first) - count, len(first)
        if not split or split >= before:
            break
    # Orbits are numbered in program order, so that neighbours stay close together.
    order = np.argsort(first)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return Symmetry(place[orbits.ravel()], first[order])


def _mix(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit numbers, so that their sums tell sets of numbers apart.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
    2014, figure 17 (mix64variant13).
    """
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
