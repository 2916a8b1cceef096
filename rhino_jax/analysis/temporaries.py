"""Temporaries that compilers write for some ops: masked and padded operands, converted
stacks; and copies of arguments."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from rhino_jax.analysis.graph import Edge, Graph, Node, NodeKind, Port
from rhino_jax.analysis.in_place import is_writable, sources_of
from rhino_jax.analysis.matmul_depth import long_row, reduces_columns
from rhino_jax.analysis.uses import copied_ports
from rhino_jax.ir.program import item_bytes
from rhino_jax.ir.traits import OpKind


@dataclass(frozen=True, slots=True)
class Masked:
    """A masked or padded temporary of a product or a convolution.

    Attributes:
      node: id of the op; the temporary is sharded as its operand.
      operand: which operand of it.
      copies: size of the temporary, in multiples of the operand.
      start, stop: when it is live, both included.
    """

    node: int
    operand: int
    copies: float
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stays:
    """A masked temporary that stays live between two products whose operands are
    sharded alike.

    Attributes:
      nodes, operands: ids of the two products, and which operand of each it is.
      copies, start, stop: as in `Masked`.
    """

    nodes: tuple[int, int]
    operands: tuple[int, int]
    copies: int
    start: int
    stop: int


def find_masked(
    graph: Graph, tiles_groups: bool, *, masks: bool = True
) -> tuple[tuple[Masked, ...], tuple[Stays, ...]]:
    """Return the copies of grouped matmuls' operands (ragged dots), masked to the rows
    of every group.

    XLA:GPU has no kernel for them. It writes one copy per group of an operand that has
    the rows, zero outside the rows of the group, and multiplies all of it: seen in
    compiled HLO of `jax.lax.ragged_dot` and of its gradients by rows and by matrices
    (h100, jax 0.10.2: `ragged_dot_rewriter`), whose temporaries are these copies to the
    byte. The gradient by rows also transposes the matrices, to contract their minor
    dim. XLA:TPU does not: its kernel skips the tiles of other groups (`is_ragged_dot`
    and `ITERATION_SKIPPER_MODE_GROUP_STARTS` in what libtpu 0.0.52 compiles).

    Products that share an operand, as gate and up projection of an expert, read one
    copy. The gradients by rows and by matrices read two, with different orders of dims,
    and are scheduled together. A forward product and the gradient by matrices read one
    copy, which stays live from the one to the other where both are sharded alike.

    Args:
      graph: the program.
      tiles_groups: whether those that rhino's kernel can run run in it, without copies.
      masks: whether the compiler masks the others (`Device.masks_groups`).
    """
    products: dict[tuple[tuple[int, int], ...], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if masks and node.op and node.op.traits.is_masked(tiles_groups):
            products[(*graph.loops_around(node.time)[-1:],)].append(node)
    masked: list[Masked] = []
    stay: list[Stays] = []
    for nodes in products.values():
        _in_one_block(nodes, masked, stay)
    return tuple(masked), tuple(stay)


def _in_one_block(nodes: list[Node], masked: list[Masked], stay: list[Stays]) -> None:
    """Append the copies of products that no loop separates.

    Args:
      nodes: the products, in program order.
      masked, stay: extended in place.
    """
    place = {node.id: at for at, node in enumerate(nodes)}
    begin = {node.id: node.time for node in nodes}
    until = dict(begin)
    pairs = [pair for reading in _readers(nodes).values() for pair in pairwise(reading)]
    for (one, i), (other, j) in pairs:
        if i != j and place[other.id] == place[one.id] + 1:
            until[one.id] = max(until[one.id], other.time)
            begin[other.id] = min(begin[other.id], one.time)
    for (one, i), (other, j) in pairs:
        start, stop = until[one.id] + 1, begin[other.id] - 1
        if i == j and start <= stop:
            ends = (one.id, other.id), (i, j)
            stay.append(Stays(*ends, _copies(one), start, stop))
    for node in nodes:
        assert node.op is not None
        span = begin[node.id], until[node.id]
        for i in node.op.traits.masked:
            masked.append(Masked(node.id, i, _copies(node), *span))
        if node.op.traits.is_turned:
            masked.append(Masked(node.id, 1, 1, node.time, node.time))


def _readers(nodes: list[Node]) -> dict[tuple[int, ...], list[tuple[Node, int]]]:
    """Return (rows, group sizes), as value ids → products that read the rows masked,
    and as which operand."""
    found: dict[tuple[int, ...], list[tuple[Node, int]]] = defaultdict(list)
    for node in nodes:
        assert node.op is not None
        for i in node.op.traits.masked:
            found[node.op.operands[i], node.op.operands[2]].append((node, i))
    return found


def _copies(node: Node) -> int:
    assert node.op is not None
    return node.op.traits.groups


def find_padded(graph: Graph, zero_taps: list[float]) -> list[list[Node]]:
    """Return, for every value that convolutions pad unevenly, these in program order.

    cuDNN pads both ends of a dim alike. XLA:GPU writes the padded value, one copy for
    the convolution and for the gradient by its kernel (`conv_padding_legalization.cc`;
    HLO of two ResNets on an H100, jax 0.11.2). Where the input is dilated, in the
    gradient by the input, it slices the result instead; a dilated input of others, as
    in a transposed convolution, it writes with its zeros.

    Args:
      graph: the program.
      zero_taps: [nodes], see `find_zero_taps`.
    """
    copied = copied_ports(graph).tolist()
    found: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op is None:
            continue
        traits = node.op.traits
        is_dilated, has_zeros = traits.input_dilation > 1, zero_taps[node.id] > 1
        if not (has_zeros if is_dilated else traits.pads_unevenly):
            continue
        for edge in graph.incoming[node.id]:
            if edge.operand == 0:
                found[copied[edge.source.id]].append(node)
    return [sorted(nodes, key=lambda n: n.time) for nodes in found.values()]


def padded_operand(nodes: list[Node]) -> Masked:
    """Return the temporary that convolutions of `find_padded` read."""
    (first, last), op = (nodes[0], nodes[-1]), nodes[0].op
    assert op is not None
    return Masked(first.id, 0, op.traits.input_dilation, first.time, last.time)


def find_row_parts(graph: Graph) -> tuple[Masked, ...]:
    """Return the partial sums of rows that no kernel reduces as a whole
    (`Observed.longest_sum`): XLA:GPU cuts a row into as many parts as each has
    elements, to a power of two (tree_reduction_rewriter.cc; HLO of h100, jax 0.10.2:
    128 parts of a row of 32,768)."""
    found = []
    for node in graph.nodes:
        row = long_row(node, graph)
        if row and not reduces_columns(node):
            length = 1 << (math.isqrt(row - 1)).bit_length()
            found.append(Masked(node.id, 0, 1 / length, node.time, node.time))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class WholeCopy:
    """A copy of a whole array: of a stack, converted, or of an argument.

    Attributes:
      node: id of the slice node of the first loop that reads it, or of the result that
        the argument is; the copy is sharded as its operand.
      whole_bytes: bytes of the unsharded copy.
      start, stop: when it is live, both included.
    """

    node: int
    whole_bytes: int
    start: int
    stop: int


def find_hoisted(graph: Graph) -> tuple[WholeCopy, ...]:
    """Return the converted copies of the stacks that loops scan over, hoisted out of
    the loops.

    XLA:TPU converts stacked float32 weights to bfloat16 once, before the first loop
    that reads them in bfloat16, and keeps the result live until the last: seen in
    compiled HLO, libtpu 0.0.51, GPT 1.3B with scanned layers. XLA:GPU converts each
    slice in the loop (jax 0.10.2, GPT 7B).
    """
    loops: dict[Port, list[tuple[Edge, int]]] = defaultdict(list)
    for edge in graph.edges:
        node = graph.nodes[edge.target]
        if node.kind is NodeKind.SLICE:
            narrow = _narrowed(graph, node, graph.outgoing[node.id])
            if narrow is not None:
                loops[edge.source].append((edge, narrow))
    found = []
    for reading in loops.values():
        first, narrow = min(reading, key=lambda r: r[0].time)
        nodes = [edge.target for edge, _ in reading]
        whole = graph.program.values[first.value]
        found.append(
            WholeCopy(
                node=first.target,
                whole_bytes=whole.size * narrow,
                start=min(graph.loop_start[n] for n in nodes),
                stop=max(graph.loop_end[n] for n in nodes),
            )
        )
    return tuple(found)


def find_returned(graph: Graph) -> tuple[WholeCopy, ...]:
    """Return the copies of arguments that are results as they are.

    A donated one is its result. Where it is not, or where several results are the same
    argument, the compilers copy it at the end of the program.
    Source: openxla/xla, xla/service/copy_insertion.cc; seen in HLO of h100 and v5e, jax
    0.10.2.
    """
    found, given = [], set[Port]()
    for edge in graph.edges:
        target = graph.nodes[edge.target]
        if target.kind not in (NodeKind.OUTPUT, NodeKind.INPUT):
            continue
        source = sources_of(graph, edge)[-1]
        if graph.nodes[source.node].kind is not NodeKind.INPUT:
            continue
        is_own = target.kind is NodeKind.OUTPUT or target.id == source.node
        if is_own and is_writable(graph, source) and source not in given:
            given.add(source)
            continue
        whole = graph.program.values[edge.value].bytes
        found.append(WholeCopy(target.id, whole, edge.time, graph.end))
    return tuple(found)


def _narrowed(graph: Graph, node: Node, edges: list[Edge]) -> int | None:
    """Return the bytes per element after the conversions that read a slice; None where
    some other op reads it, or where they do not narrow it."""
    values = graph.program.values
    widths = set()
    for edge in edges:
        reader = graph.nodes[edge.target]
        if reader.op_kind is not OpKind.CONVERSION:
            return None
        widths.add(item_bytes(values[reader.value].dtype))
    if len(widths) != 1:
        return None
    width = widths.pop()
    return width if width < item_bytes(values[node.value].dtype) else None
