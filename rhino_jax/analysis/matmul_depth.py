"""Matmul depth: the number of matmuls, and other ops that cannot fuse, before a node.

Two nodes of different depth have such an op between them. They cannot be one fusion,
and a collective that one waits for can overlap with it. Nodes wait for scalars, too,
which the graph has no edges for: for a norm, and for the predicate of a branch.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.analysis.row_kernels import find_row_kernels, row_size
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.ir.traits import OpKind


SUMS = (OpKind.REDUCTION, OpKind.CONTRACTION)
"""Kinds of the ops that sum in a fusion; of products only those of vectors do."""


@dataclass(frozen=True, slots=True)
class MatmulDepth:
    """The depths of a graph's nodes.

    Attributes:
      at: [nodes], number of such ops on the longest path to the node.
      behind: [nodes], likewise for the readers of its result.
      rotated: ids of the nodes that end a fusion: computed through a rotation, and read
        by several ops; or a stencil of slices and pads that another one reads.
    """

    at: list[int]
    behind: list[int]
    rotated: frozenset[int] = frozenset()


def find_matmul_depth(
    graph: Graph, *, of_kernels: bool = False, after_sums: bool = False
) -> MatmulDepth:
    """Return the matmul depths of a graph's nodes.

    Args:
      graph: the program.
      of_kernels: whether the readers of a reduction to a scalar are one level deeper,
        too, because no kernel reads the scalar that it computes.
      after_sums: likewise of sums that run in a kernel before their readers: over
        columns, over long rows, and over rows that no kernel holds.
    """
    rotated = _find_rotated(graph)
    in_rows = find_row_kernels(graph) if after_sums else frozenset()
    num_nodes = len(graph.nodes)
    at = [0] * len(graph.scalar_sources)
    # A loop's carry reads a value that is computed after it: initialise all levels.
    behind = [
        int(
            _is_heavy(node)
            or node.id in rotated
            or (of_kernels and _is_read_as_scalar(node, graph))
            or (after_sums and _ends_kernel(node, graph, in_rows))
        )
        for node in graph.nodes
    ] + [0] * len(graph.scalars)
    for step in graph.steps:
        deepest = max([behind[s] for s in graph.scalar_sources[step]], default=0)
        if step < num_nodes and graph.nodes[step].kind is not NodeKind.INPUT:
            for edge in graph.incoming[step]:
                level = behind[edge.source.node]
                if level > deepest:
                    deepest = level
        at[step] = deepest
        behind[step] += deepest
    return MatmulDepth(at[:num_nodes], behind[:num_nodes], rotated)


def _is_read_as_scalar(node: Node, graph: Graph) -> bool:
    is_sum = node.is_fused and node.op_kind in SUMS
    return is_sum and bool(graph.scalar_readers[node.id])


def _find_rotated(graph: Graph) -> frozenset[int]:
    """Return `MatmulDepth.rotated`: in a stencil of a stencil, each reader needs the
    inner one at several positions, and would compute it as many times."""
    if not graph.fuses_rotations:
        return frozenset()
    through = [False] * len(graph.nodes)
    at: list[frozenset[_Position]] = [frozenset()] * len(graph.nodes)
    reads = _shifted_reads(graph)
    found: set[int] = set()
    for node in graph.run_order:
        if not node.is_fusible or node.op is None:
            continue
        sources = {n.id for n in graph.nodes_before(node.id)}
        if node.op.traits.is_rotation or any(through[n] for n in sources - found):
            through[node.id] = True
            if len(graph.outgoing[node.id]) > 1:
                found.add(node.id)
        if not reads:
            continue
        at[node.id] = _positions(node, sources, at)
        if node.op_kind is not OpKind.MOVEMENT and node.id in reads:
            counts = Counter(source for source, _ in at[node.id])
            most = max(counts.values(), default=1)
            if (most - 1) * (reads[node.id] - 1) > OBSERVED.stencils:
                found.add(node.id)
        if node.id in found:
            at[node.id] = frozenset()
    return frozenset(found)


_Position = tuple[int, tuple[int, ...]]
"""A node, and for every dim how far from its own element another node reads it."""


def _positions(
    node: Node, sources: set[int], at: Sequence[frozenset[_Position]]
) -> frozenset[_Position]:
    """Return the positions at which a fusible node reads those before it, as far as
    shifts lead; of many, some.

    Args:
      node: the node.
      sources: ids of the nodes that it reads.
      at: [nodes], the positions of those before it.
    """
    before = frozenset[_Position]().union(*(at[n] for n in sources))
    shifts = _shifts(node)
    if shifts is not None:
        before = before or frozenset((n, (0,) * len(shifts)) for n in sources)
        before = frozenset(
            (n, tuple(map(operator.add, offsets, shifts)))
            for n, offsets in before
            if len(offsets) == len(shifts)
        )
    return frozenset(sorted(before)[: OBSERVED.most_positions])


def _shifts(node: Node) -> tuple[int, ...] | None:
    """Return the shift of every dim of a slice or pad; None where nothing is
    shifted."""
    rule = node.rule
    if rule is None or not node.is_fusible:
        return None
    factors = rule.factors
    if all(f.shift is None for f in factors):
        return None
    return tuple((factors[d[0]].shift or 0) if d else 0 for d in rule.results[0])


def _shifted_reads(graph: Graph) -> dict[int, float]:
    """Return, for the nodes that a shift reads, how often each of their elements is
    read."""
    reads: dict[int, float] = {}
    values = graph.program.values
    for node in reversed(graph.run_order):
        readers = graph.nodes_behind(node.id)
        shifting = [n for n in readers if _shifts(n) is not None]
        if not shifting or node.op is None:
            continue
        count = float(len(shifting) < len(readers))
        size = max(values[node.value].size, 1)
        for reader in shifting:
            share = values[reader.value].size / size
            count += reads.get(reader.id, 1.0) * share
        reads[node.id] = count
    return reads


def _is_heavy(node: Node) -> bool:
    if node.kind is NodeKind.OP:
        return not node.is_fused
    return node.kind in (NodeKind.CARRY, NodeKind.STACK)


def _ends_kernel(node: Node, graph: Graph, in_rows: frozenset[int]) -> bool:
    """Whether what reads a reduction runs in another kernel: of columns, of rows that
    no kernel reduces as a whole, or that none holds for its readers."""
    if reduces_columns(node) or long_row(node, graph):
        return True
    is_row = row_size(node, graph) >= OBSERVED.shortest_sum
    return is_row and node.id not in in_rows


def long_row(node: Node, graph: Graph) -> int:
    """Return the number of elements of each row that a reduction reduces, where no
    kernel does it as a whole (`Observed.longest_sum`); 0 for other nodes."""
    values = graph.program.values
    if node.op is None or node.op_kind is not OpKind.REDUCTION or not node.is_fused:
        return 0
    read, made = values[node.op.operands[0]].size, values[node.value].size
    return read // made if read > OBSERVED.longest_sum * made else 0


def reduces_columns(node: Node) -> bool:
    """Whether an op reduces dims other than the last ones."""
    rule = node.rule
    if rule is None or node.op_kind is not OpKind.REDUCTION or not node.is_fused:
        return False
    have, made = rule.operands[0], rule.results[0]
    kept = [dim for dim in have if dim in made]
    return list(have[: len(kept)]) != kept
