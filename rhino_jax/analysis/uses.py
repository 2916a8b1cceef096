"""Readers of every port, where shared copies and views count as what they copy."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from rhino_jax.analysis.graph import Columns, Graph, Node, NodeKind
from rhino_jax.analysis.matmul_depth import MatmulDepth
from rhino_jax.ir.factor import Dim, Rule
from rhino_jax.ir.traits import OpKind


def are_views(graph: Graph) -> np.ndarray:
    """Return [nodes], whether each is a view, so that its reader reads its operand.

    Views are reshapes that move nothing, since every device holds a single index of a
    new dim, and transposes that products fold.

    The operands of ops with a deferred reduction (`passes.deferred_reductions`) are
    views: for products, a contracted dim split into a batch dim and the rest; for
    convolutions, a dim split into groups. The new dim is sharded to single indices,
    which leaves the array as it was; no compiler moves anything for it (v5e:2x2,
    v5e:2x4, 8 H100, CPU: no copy in HLO).

    Products read a transposed operand as it is stored, where its batch dims lie before
    all others, in the product's order, and what is contracted beside what is not (XLA's
    xla/service/transpose_folding.cc and layout assignment; HLO of h100, jax 0.10.2:
    `x @ w.T` and a loop around it, not `jnp.transpose(x, (0, 2, 1, 3)) @ y`).
    """
    found = np.zeros(len(graph.nodes), dtype=bool)
    for node in reversed(graph.nodes):
        readers, made = graph.outgoing[node.id], node.rule
        if node.op is None or made is None:
            continue
        if node.op.name == "transpose":
            found[node.id] = _is_folded(graph, node, made)
        if node.op.name != "reshape" or len(readers) != 1:
            continue
        (edge,) = readers
        reader = graph.nodes[edge.target]
        if (rule := reader.rule) is None:
            continue
        if reader.op_kind is OpKind.CONTRACTION:
            found[node.id] = _parts(made, rule, edge.operand)
        elif reader.op_kind is OpKind.CONVOLUTION:
            found[node.id] = _groups(made, rule, edge.operand)
        elif found[reader.id]:
            found[node.id] = _splits(made, rule)
    return found


def _is_folded(graph: Graph, node: Node, made: Rule) -> bool:
    """Whether products alone read a transpose, and each folds it."""
    readers = list(graph.outgoing[node.id])
    for edge in readers:
        reader = graph.nodes[edge.target]
        if reader.kind is NodeKind.COPY:
            readers += graph.outgoing[reader.id]
            continue
        rule, is_product = reader.rule, reader.op_kind is OpKind.CONTRACTION
        if rule is None or not is_product or not reader.hosts_fusion:
            return False
        role = functools.partial(_role, rule, edge.operand)
        dims = rule.operands[edge.operand]
        stored = [dims[made.results[0].index(d)] for d in made.operands[0]]
        runs = [key for key, _ in itertools.groupby(stored, role)]
        if len(runs) > len(set(runs)) or _BATCH in runs[1:]:
            return False
        if sorted(stored, key=role) != sorted(dims, key=role):
            return False
    return bool(readers)


_BATCH, _FREE, _SUMMED = range(3)


def _role(rule: Rule, operand: int, dim: Dim) -> int:
    """Return the role of a product's operand's dim."""
    if any(rule.factors[f].reducer for f in dim):
        return _SUMMED
    shared = itertools.chain(*rule.operands[1 - operand])
    return _FREE if set(dim).isdisjoint(shared) else _BATCH


def _parts(made: Rule, rule: Rule, operand: int) -> bool:
    """Whether, of the dim that a reshape splits, a product has all parts but the last
    as batch dims, and contracts the last."""
    before, after = made.operands[0], made.results[0]
    if len(rule.operands) != 2 or any(len(dim) > 1 for dim in after):
        return False
    places = {dim[0]: d for d, dim in enumerate(after) if dim}
    others = {f for dim in rule.operands[1 - operand] for f in dim}
    for dim in (dim for dim in before if len(dim) > 1):
        roles = [rule.operands[operand][places[f]] for f in dim if f in places]
        if len(roles) != len(dim) or not all(roles):
            return False
        shared = [r[0] in others and not rule.factors[r[0]].reducer for r in roles]
        if not all(shared[:-1]) or rule.factors[roles[-1][0]].reducer != "sum":
            return False
    return any(len(dim) > 1 for dim in before)


def _groups(made: Rule, rule: Rule, operand: int) -> bool:
    """Whether a convolution has, as its groups, a dim that a reshape merged into
    another."""
    pairs = zip(made.results[0], rule.operands[operand], strict=True)
    merged = [(dim, read) for dim, read in pairs if len(dim) > 1]
    return len(merged) == 1 and all(
        len(dim) == len(read) == 2
        and _sizes(made, dim) == _sizes(rule, read)
        and (dim[0],) in made.operands[0]
        for dim, read in merged
    )


def _splits(made: Rule, view: Rule) -> bool:
    """Whether a reshape splits one dim, and a view behind it merges its first part
    elsewhere."""
    parted = [dim for dim in made.operands[0] if len(dim) > 1]
    if len(parted) != 1 or any(len(dim) > 1 for dim in made.results[0]):
        return False
    place = made.results[0].index((parted[0][0],))
    merged = [dim for dim in view.results[0] if len(dim) > 1]
    return [d[0] for d in merged] == list(view.operands[0][place])


def _sizes(rule: Rule, dim: tuple[int, ...]) -> list[int]:
    return [rule.factors[f].size for f in dim]


NOWHERE = -1
"""Stands for no node and no port."""


def looks_up(node: Node) -> bool:
    """Whether a node is a look-up of rows."""
    return node.op_kind is OpKind.LOOKUP


def sums(node: Node) -> bool:
    """Whether a node is a sum over dims."""
    rule = node.rule
    if rule is None or node.op_kind is not OpKind.REDUCTION:
        return False
    return any(f.reducer == "sum" for f in rule.factors)


def convolves(node: Node, operand: int) -> bool:
    """Whether a node is a convolution of this operand's images."""
    return node.op_kind is OpKind.CONVOLUTION and not operand


def find_scattered_onto(graph: Graph) -> dict[tuple[int, int], int]:
    """Return (addition, id of a port that it adds) → the scatter that combines its
    updates with that value in place of zeros, and whose result the sum then is.

    XLA's algebraic simplifier makes `scatter(a, updates)` of `a + scatter(zeros,
    updates)`, as in the gradient of a cross entropy with integer labels. A constant
    that is broadcast is taken to be zeros.
    """
    found = {}
    for node in graph.nodes:
        op = node.op
        if op is None or op.traits.kind is not OpKind.SCATTER:
            continue
        readers = graph.readers[node.ports[0].id]
        if op.traits.reducer != "sum" or not op.traits.accumulates or len(readers) != 1:
            continue
        reader = graph.nodes[readers[0].target]
        if reader.op is None or not _is_into_constant(graph, node):
            continue
        traits = reader.op.traits
        if traits.reducer == "sum" and traits.accumulates == (0, 1):
            added = graph.incoming[reader.id]
            others = [e.source.id for e in added if e.source.node != node.id]
            found.update({(reader.id, port): node.id for port in others})
    return found


def find_filled(graph: Graph, onto: Collection[int]) -> frozenset[int]:
    """Return the ids of the ports of fusible ops into which scatters write.

    XLA:GPU writes zeros to memory before a kernel adds to them; XLA:TPU's kernels begin
    with zeros (HLO of h100, jax 0.10.2, and of v5e, libtpu 0.0.52: gradients of
    look-ups, segment sums).

    Args:
      graph: the program.
      onto: ids of the scatters that write into other values.
    """
    return frozenset(
        edge.source.id
        for edge in graph.edges
        if edge.operand == 0 and edge.target not in onto
        if graph.nodes[edge.source.node].is_fusible
        if graph.nodes[edge.target].op_kind is OpKind.SCATTER
    )


def find_selects(graph: Graph) -> frozenset[int]:
    """Return the ids of scatters of one element into every row of a constant.

    XLA:TPU compares an iota with the indices, and selects, in the fusion of the reader
    (HLO of v5e, libtpu 0.0.52: the gradient of a cross entropy with integer labels).
    """
    found = set()
    for node in graph.nodes:
        op = node.op
        if op is None or op.rule is None or op.traits.kind is not OpKind.SCATTER:
            continue
        factors, rows = op.rule.factors, op.rule.operands[-1]
        wide = {f for dim in rows for f in dim if factors[f].size > 1}
        others = {f for dim in op.rule.results[0][:-1] for f in dim}
        added, made = (
            graph.program.values[v].shape for v in (op.operands[-1], op.results[0])
        )
        is_row = wide <= others and math.prod(added) == math.prod(made[:-1])
        if made and is_row and _is_into_constant(graph, node):
            found.add(node.id)
    return frozenset(found)


def _is_into_constant(graph: Graph, scatter: Node) -> bool:
    """Whether a scatter writes into a constant of the program, which is broadcast."""
    return all(
        base.op_kind is OpKind.BROADCAST and not graph.incoming[base.id]
        for base in graph.nodes_before(scatter.id, operand=0)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """Pairs of a port and a node that reads it, in the order of ports.

    Attributes:
      num_ports: number of ports of the graph.
      port, node: [pairs], their ids.
      begin: [ports + 1], position of each port's first pair; at last, the number of
        pairs.
      nodes: `node` as a list.
    """

    num_ports: int
    port: np.ndarray
    node: np.ndarray
    begin: list[int]
    nodes: list[int]

    @classmethod
    def of(cls, graph: Graph) -> Readers:
        columns, num_ports = graph.columns, len(graph.ports)
        is_view = are_views(graph)
        # Reading a view is reading the port behind it, and only that.
        is_passed = columns.is_copy | is_view
        is_own = ~is_passed[columns.target] & ~is_view[columns.maker[columns.source]]
        behind = copied_ports(graph)[columns.source]
        is_behind = (behind != columns.source) & ~is_passed[columns.target]
        port = np.concatenate([columns.source[is_own], behind[is_behind]])
        node = np.concatenate([columns.target[is_own], columns.target[is_behind]])
        order = np.argsort(port, kind="stable")
        port, node = port[order], node[order]
        begin = np.searchsorted(port, np.arange(num_ports + 1))
        return cls(num_ports, port, node, begin.tolist(), node.tolist())

    def of_port(self, port: int) -> list[int]:
        """Return the ids of the nodes that read a port, once per read."""
        return self.nodes[self.begin[port] : self.begin[port + 1]]

    def count(self, which: np.ndarray) -> np.ndarray:
        """Return [ports], the number of reads by nodes for which `which`, [nodes], is
        True."""
        return np.bincount(self.port[which[self.node]], minlength=self.num_ports)

    def largest(self, values: np.ndarray) -> np.ndarray:
        """Return [ports], the maximum of `values`, [nodes], over the readers; 0 without
        any."""
        found = np.zeros(self.num_ports, dtype=values.dtype)
        np.maximum.at(found, self.port, values[self.node])
        return found


def copied_ports(graph: Graph) -> np.ndarray:
    """Return [ports], for the port of a shared copy or of a view, the port that it
    copies, looking through further ones; itself for all others."""
    columns = graph.columns
    of_node = np.full(len(graph.nodes), NOWHERE)
    is_copied = (columns.is_copy | are_views(graph))[columns.target]
    of_node[columns.target[is_copied]] = columns.source[is_copied]
    behind = of_node[columns.maker]
    found = np.where(behind == NOWHERE, np.arange(len(behind)), behind)
    while ((further := found[found]) != found).any():
        found = further
    return found


def read_ports(graph: Graph) -> np.ndarray:
    """Return [edges], the port that is read: for a fused reader of a copy in front of
    fusible ops, the port behind the copy."""
    columns = graph.columns
    is_front = np.zeros(len(graph.nodes), dtype=bool)
    is_front[list(graph.fronts)] = True
    is_behind = (
        columns.is_fused[columns.target] & is_front[columns.maker[columns.source]]
    )
    return np.where(is_behind, copied_ports(graph)[columns.source], columns.source)


@dataclass(frozen=True, slots=True, eq=False)
class PortReads:
    """The reads of every port, as lists of length [ports].

    Attributes:
      count, num_matmuls: number of its reads, and of those by matmuls.
      deepest: the deepest level at which it is read.
      is_needed, is_needed_unstacked: whether some reader needs it in memory; and some
        reader that is no stack of a loop.
      ends_fusion: whether some reader needs it in memory, where a matmul's fusion
        computes it.
      feeds_matmul, is_parted: whether some reader fuses into the matmul that it is
        computed for, and whether other readers do not.
    """

    count: list[int]
    num_matmuls: list[int]
    deepest: list[int]
    is_needed: list[bool]
    is_needed_unstacked: list[bool]
    ends_fusion: list[bool]
    feeds_matmul: list[bool]
    is_parted: list[bool]

    @classmethod
    def of(
        cls,
        readers: Readers,
        columns: Columns,
        depth: MatmulDepth,
        before: Mapping[int, int],
        with_matmuls: bool,
        looks_up: np.ndarray,
    ) -> PortReads:
        """Count the reads of every port.

        Args:
          readers: of all ports.
          columns, depth: of the graph.
          before: node id → the only matmul that it is computed for.
          with_matmuls: whether elementwise producers fuse into matmuls.
          looks_up: [nodes], look-ups that such producers fuse into.
        """
        fuses = columns.is_op & columns.is_fused
        computes = fuses | columns.hosts_fusion if with_matmuls else fuses
        computes = computes | looks_up
        runs_before = np.zeros(len(fuses), dtype=bool)
        runs_before[list(before)] = True
        num_before, num_else = readers.count(runs_before), readers.count(~runs_before)
        return cls(
            (num_before + num_else).tolist(),
            readers.count(columns.hosts_fusion).tolist(),
            readers.largest(np.array(depth.at)).tolist(),
            (readers.count(~computes) > 0).tolist(),
            (readers.count(~computes & ~columns.is_stack) > 0).tolist(),
            (readers.count(~fuses) > 0).tolist(),
            (num_before > 0).tolist(),
            ((num_before > 0) & (num_else > 0)).tolist(),
        )
