"""Dim classes: sets of dims, across the program, that are the same index range.

Two dims belong to one class when some op gives them the same factor, or when they are
the same dim of a value at both ends of an edge. In a transformer the residual width,
the heads, the hidden width, the vocabulary, batch and sequence come out as classes. The
experts' recipes are stated in these terms (`roles`); the search itself needs none.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.ir.factor import FactorKind, Layout, Rule
from rhino_jax.ir.traits import OpKind
from rhino_jax.utils.union_find import groups, number, number_rows, united


Element = int
"""A factor of an op or a dim of a border node's inner value, numbered over the
graph."""


@dataclass(slots=True)
class DimClasses:
    """The dim class of every factor and dim of a graph.

    Attributes:
      graph: the graph.
      first: [nodes], first element of each node; its others follow.
      names: [elements], dim class of each, named by the first element of the class.
    """

    graph: Graph
    first: list[Element]
    names: list[Element]

    def factors(self, node: Node) -> list[Element]:
        """Return the class of every factor of an op."""
        assert node.rule is not None
        begin = self.first[node.id]
        return self.names[begin : begin + len(node.rule.factors)]

    def results(self, node: Node, index: int) -> list[Element | None]:
        """Return the class of every dim of a result; for a merged dim, that of its
        major factor."""
        return self._resolve(node, _result_layout(self.graph, node, index))

    def operands(self, node: Node, index: int) -> list[Element | None]:
        """Return the class of every dim of an operand."""
        return self._resolve(node, _operand_layout(self.graph, node, index))

    def _resolve(self, node: Node, layout: Layout) -> list[Element | None]:
        begin = self.first[node.id]
        return [self.names[begin + dim[0]] if dim else None for dim in layout]

    def have(self, which: frozenset[Element]) -> list[bool]:
        """Return [nodes], whether any factor or dim of each belongs to one of these
        classes."""
        is_of = np.concatenate([[0], np.cumsum(np.isin(self.names, list(which)))])
        return (np.diff(is_of[self.first]) > 0).tolist()


def find_dim_classes(graph: Graph) -> DimClasses:
    """Unite the dims of a graph into dim classes."""
    counts = [_num_elements(graph, node) for node in graph.nodes]
    first = np.concatenate([[0], np.cumsum(np.array(counts, dtype=np.int64))])
    makers = graph.columns.maker[graph.columns.source]
    made, read = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for edges in _laid_out_alike(graph):
        edge = graph.edges[edges[0]]
        dims = zip(
            _result_layout(graph, graph.nodes[edge.source.node], edge.source.result),
            _operand_layout(graph, graph.nodes[edge.target], edge.operand),
            strict=True,
        )
        for a, b in dims:
            if a and b:
                made.append(first[makers[edges]] + a[0])
                read.append(first[graph.columns.target[edges]] + b[0])
    names = united(int(first[-1]), np.concatenate(made), np.concatenate(read))
    return DimClasses(graph, first.tolist(), names.tolist())


def _laid_out_alike(graph: Graph) -> list[np.ndarray]:
    """Group the edges by the layouts at both ends."""
    values, columns = graph.program.values, graph.columns
    # Many ops share one rule.
    kinds = number(
        id(n.rule) if n.rule is not None else (n.kind, values[n.value].rank)
        for n in graph.nodes
    )
    alike = number_rows(
        kinds[columns.maker[columns.source]],
        columns.result[columns.source],
        kinds[columns.target],
        columns.operand,
    )
    return groups(alike)


def _num_elements(graph: Graph, node: Node) -> int:
    if node.rule is not None:
        return len(node.rule.factors)
    return graph.program.values[node.value].rank


def _result_layout(graph: Graph, node: Node, index: int) -> Layout:
    if node.rule is not None:
        return node.rule.results[index]
    rank = graph.program.values[node.value].rank
    return _border_layout(rank, node.kind is NodeKind.STACK)


def _operand_layout(graph: Graph, node: Node, index: int) -> Layout:
    if node.rule is not None:
        return node.rule.operands[index]
    rank = graph.program.values[node.value].rank
    if node.kind is NodeKind.STACK:
        return _border_layout(rank - 1, False)
    if node.kind is NodeKind.SLICE:
        return _border_layout(rank + 1, True)
    return _border_layout(rank, False)


@functools.cache
def _border_layout(rank: int, is_stack: bool) -> Layout:
    """Return the layout of a border node's value; a stack's first dim is no element."""
    dims = tuple((d,) for d in range(rank - is_stack))
    return ((), *dims) if is_stack else dims


def dims_off_lanes(graph: Graph, dim_classes: DimClasses) -> dict[int, tuple[int, ...]]:
    """Return, by value id, the dims that a compiler never lays out on the lanes (the
    minor dim) of a tile; values without any are left out.

    Of the dims that a reshape splits one dim into, only the last may be: with another
    there, the reshape would be a transpose. GroupNorm's f32[8,16,16,32,8] of 256
    channels is stored with 16 columns of the image on its lanes, not its 32 groups
    (U-Net on v5e:4x4, libtpu 0.0.52). Where nothing reshards it, the compiler may never
    materialise it at all.

    Convolutions read and write channels, or the batch, on the lanes, and so does what
    is computed of their results elementwise: of bf16[32,4096,64] each of 64 channels
    takes two (v5e, libtpu 0.0.52). Inputs of the program are stored as others are, and
    so are positions that a reshape merges into as many as the image has rows: 16 x 16
    patches of 256 x 256, and attention's scores of them.

    Args:
      graph: the program.
      dim_classes: the dim classes of its graph.
    """
    parts: set[tuple[Element, int]] = set()
    windows: set[tuple[Element | None, int]] = set()
    # Many ops share one rule.
    major: dict[int, tuple[list[int], set[tuple[int, int]]]] = {}
    joined: set[tuple[Element | None, int]] = set()
    for node in graph.nodes:
        rule = node.rule
        if node.op is None or rule is None:
            continue
        if id(rule) not in major:
            layouts = (*rule.operands, *rule.results)
            long_dims = {dim for layout in layouts for dim in layout if len(dim) > 1}
            major[id(rule)] = (
                [f for dim in long_dims for f in dim[:-1]],
                {(d[0], math.prod(rule.factors[f].size for f in d)) for d in long_dims},
            )
        factors, merged = major[id(rule)]
        if factors:
            names = dim_classes.factors(node)
            parts |= {(names[f], rule.factors[f].size) for f in factors}
            joined |= {(names[f], size) for f, size in merged}
        if node.op_kind is OpKind.CONVOLUTION:
            read, made = dim_classes.operands(node, 0), dim_classes.results(node, 0)
            for dims, value, layout in (
                (read, node.op.operands[0], rule.operands[0]),
                (made, node.op.results[0], rule.results[0]),
            ):
                shape = graph.program.values[value].shape
                windows |= {(dims[d], shape[d]) for d in window_dims(layout, rule)}
    windows -= joined
    if not parts | windows:
        return {}
    found: dict[int, tuple[int, ...]] = {}
    for value, port in graph.held.items():
        maker = graph.nodes[port.node]
        dims = dim_classes.results(maker, port.result)
        shape = graph.program.values[value].shape
        sized = list(zip(dims, shape, strict=True))
        slid = tuple(d for d, dim in enumerate(sized) if dim in windows)
        if slid and len(slid) == len(shape) - 2 and maker.kind is not NodeKind.INPUT:
            found[value] = slid
            continue
        # A merged dim has the class of its major factor: sizes tell the two apart.
        off = tuple(d for d, dim in enumerate(sized) if dim in parts)
        if off:
            found[value] = off
    return found


def window_dims(layout: Layout, rule: Rule) -> tuple[int, ...]:
    """Return the dims of an operand or a result of a convolution that are neither its
    batch nor its channels."""
    kinds = FactorKind.HALO, FactorKind.WHOLE
    return tuple(
        d for d, dim in enumerate(layout) if rule.factors[dim[0]].kind in kinds
    )
