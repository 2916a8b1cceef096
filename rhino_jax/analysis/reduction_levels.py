"""Levels of reductions: the partial sums that one combined all-reduce may hold.

XLA's combiners put collectives of one reduction, element type and set of devices into
one where none depends on another (`CombineInstructionsByKey` in openxla/xla,
collective_combiner_utils.h). XLA:TPU does so from the end of the program: of a ResNet
on v5e:2x4 what nothing waits for, gradients of weights and of norms, becomes one
all-reduce of 20 arrays, and the statistics of a shortcut's batch norm go with those of
the norm that is as far from the end (58 planned all-reduces run as 25, libtpu 0.0.52).

So the level of a reduction is the largest number of reductions between it and the end,
its own not counted. Shards of one dim class make partial sums of one set of devices:
levels count the reductions over one class. Thresholds (120 MiB) are not modelled: where
they bind, latency does not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from rhino_jax.analysis.dim_classes import DimClasses, Element
from rhino_jax.analysis.graph import Graph, Node


def find_latency_shares(
    graph: Graph, dim_classes: DimClasses
) -> Mapping[int, tuple[float, ...]]:
    """Return the share of a combined reduction's latency that each node pays.

    Args:
      graph: the program.
      dim_classes: the dim classes of its factors.
    Returns:
      Node id → one share per factor of its op, which counts where that factor is
      sharded: 1 over the number of reductions of its level, 0 for factors that are not
      reduced. Nodes that share with no other are absent.
    """
    reduced = {n.id: own for n in graph.nodes if (own := _reduced(n, dim_classes))}
    counts = Counter(name for own in reduced.values() for name in own.values())
    shared = [name for name, count in counts.items() if count > 1]
    column = {name: at for at, name in enumerate(shared)}
    levels = _levels(graph, reduced, column)
    sites = {
        (id_, f): (
            name,
            int(levels[id_, column[name]]),
            *_runs_with(graph, graph.nodes[id_], f),
        )
        for id_, own in reduced.items()
        for f, name in own.items()
        if name in column
    }
    members = Counter(sites.values())
    found: dict[int, tuple[float, ...]] = {}
    for id_, own in reduced.items():
        sizes = {f: members[sites[id_, f]] if (id_, f) in sites else 1 for f in own}
        if max(sizes.values()) > 1:
            count = len(dim_classes.factors(graph.nodes[id_]))
            found[id_] = tuple(
                1 / sizes[f] if f in sizes else 0.0 for f in range(count)
            )
    return found


def _reduced(node: Node, dim_classes: DimClasses) -> dict[int, Element]:
    """Return the factors of a node whose shards leave partial results, and their
    classes."""
    rule = node.rule
    if rule is None:
        return {}
    names = dim_classes.factors(node)
    return {f: name for f, name in enumerate(names) if rule.partial_results(f)}


def _levels(
    graph: Graph,
    reduced: Mapping[int, Mapping[int, Element]],
    column: Mapping[Element, int],
) -> np.ndarray:
    """Return [nodes, classes], the most reductions over each class on a path from a
    node to the end of the program; a loop's end ends the paths in its body."""
    after = np.zeros((len(graph.scalar_readers), len(column)), dtype=np.int32)
    own = np.zeros_like(after)
    for id_, names in reduced.items():
        own[id_, [column[name] for name in names.values() if name in column]] = 1
    for step in reversed(graph.steps):
        targets = set(graph.scalar_readers[step])
        if step < len(graph.nodes):
            targets.update([edge.target for edge in graph.outgoing[step]])
        if targets:
            at = sorted(targets)
            after[step] = (after[at] + own[at]).max(0)
    return after


def _runs_with(graph: Graph, node: Node, factor: int) -> tuple[object, ...]:
    """Return what reductions that are combined have in common: the loop and the
    compiled program that they are in, the element type, and how partial results
    combine."""
    assert node.rule is not None
    around = graph.loops_around(node.time)
    dtype = graph.program.values[node.value].dtype
    reducer = node.rule.factors[factor].reducer
    return (*around[-1:], graph.alone.get(node.id, 0), dtype, reducer)
