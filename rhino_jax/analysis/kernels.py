"""Fusions: the ops that run as one kernel, and the operands that each kernel reads from
memory.

Elementwise ops of the same depth that read or produce each other's values are one
fusion after the compiler's producer, sibling and multi-output fusion; so is a reduction
of what they produce or read. An optimizer's update of one leaf reads gradient, moments
and parameter once and writes three values, however many ops it has.

Ops on both sides of a matmul differ in depth (see `matmul_depth`), and cannot be one
fusion. Where the compiler fuses them into the matmul, they are one kernel with it: its
traffic is hidden behind its arithmetic, or the reverse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.analysis.materialised import Materialised
from rhino_jax.analysis.matmul_depth import MatmulDepth
from rhino_jax.analysis.uses import (
    NOWHERE,
    are_views,
    copied_ports,
    looks_up,
    read_ports,
    sums,
)
from rhino_jax.hardware.target import KernelRates
from rhino_jax.ir.program import item_bytes
from rhino_jax.ir.traits import ELEMENTWISE_KINDS, OpKind
from rhino_jax.utils.union_find import number_rows, united


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The memory reads and the launches of a graph's kernels.

    Attributes:
      reads: [nodes], positions of the operands that are read from memory; a value that
        several ops of a fusion read is listed at the first of them only.
      parts: node id → number of readers in its kernel that take a part of its first
        operand, of about as many elements as its result has, where no other does.
      launches: [nodes], whether the node stands for a kernel launch, of its own or of
        its fusion.
      vector_ops: [nodes], operations of vector units for one FLOP of an op in a kernel
        whose elementwise arithmetic takes longer than its reads and writes; 0 for ops
        of all other kernels.
      through: (node, operand) → what its kernel reads in the operand's place: of a
        matmul what it computes it from, of a value in two types the narrower.
      widened: node → operand, or NOWHERE for the result, that takes vector units one
        more pass in float32: of each kernel that reduces or that stores no array
        of 4-byte elements as large, its widest (see `model.traffic`).
      epilogues: matmul → what its fusion moves for the ops that run after it, whose own
        `reads` are empty.
      of_epilogues: ids of these ops.
    """

    reads: list[tuple[int, ...]]
    parts: dict[int, int]
    launches: list[bool]
    vector_ops: list[float]
    through: dict[tuple[int, int], Through]
    widened: dict[int, int]
    epilogues: dict[int, Epilogue]
    of_epilogues: frozenset[int]

    def ratio(self, node: Node, operand: int) -> float:
        """Return the bytes that a kernel reads for an operand over the operand's."""
        through = self.through.get((node.id, operand))
        return 1.0 if through is None else through.ratio


class Epilogue(NamedTuple):
    """The values that a matmul's fusion moves besides its operands and result.

    Attributes:
      reads: (port id, time) of the values that it reads.
      writes: ids of the ports that it stores.
      computes: whether its ops do more than move and convert the result.
      reduces: whether some reduce.
    """

    reads: tuple[tuple[int, int], ...]
    writes: tuple[int, ...]
    computes: bool
    reduces: bool


class Through(NamedTuple):
    """The stored values from which a kernel computes an operand.

    Attributes:
      port: id of the port of the largest.
      ratio: their bytes over the operand's.
    """

    port: int
    ratio: float


def find_kernels(
    graph: Graph,
    depth: MatmulDepth,
    materialised: Materialised,
    ops_per_byte: float,
    rates: KernelRates,
) -> Kernels:
    """Group the ops into kernels, and list what each kernel reads.

    Args:
      graph: the program.
      depth: of its nodes.
      materialised: which values touch memory, and which ops fuse into a matmul.
      ops_per_byte: operations of the vector units in the time of a byte to or from
        memory; `inf` where they are not modelled.
      rates: the operations that functions and reductions take.
    """
    columns, num_nodes = graph.columns, len(graph.nodes)
    in_memory = np.array(materialised.ports, dtype=bool)
    # An op that does not fuse is a kernel of its own, and reads all of its operands.
    own = num_nodes + np.arange(num_nodes)
    group = np.where(columns.is_fused, _fusions(graph, depth, materialised), own)
    home, is_after = materialised.epilogue_of, materialised.epilogue_of != NOWHERE
    group[is_after] = own[home[is_after]]
    port = copied_ports(graph)[columns.source]
    maker, reader = columns.maker[port], columns.target
    is_of_matmul = materialised.matmul_of != NOWHERE
    is_computed = columns.is_fusible[maker] & ~in_memory[port]
    is_inside = columns.hosts_fusion[reader] & is_computed
    # A kernel that stores nothing is none: its ops run in the matmuls that read them.
    is_kernel = np.ones(2 * num_nodes, dtype=bool)
    is_kernel[group[maker[is_inside | is_of_matmul[reader] & is_computed]]] = False
    is_kernel[group[columns.maker[in_memory]]] = True
    is_kernel[own] = True
    # A matmul's fusion reads what the ops after it do, see `epilogues`.
    reads_itself = ~is_after[reader] & columns.is_op[reader] & ~are_views(graph)[reader]
    is_read = reads_itself & is_kernel[group[reader]] & (in_memory[port] | is_inside)
    read = np.flatnonzero(is_read & (group[maker] != group[reader]))
    takes = np.array([_takes_part(graph, node) for node in graph.nodes])
    # A part is read with the whole, where that is read, too.
    order = columns.operand[read], columns.place[reader[read]], takes[reader[read]]
    read = read[np.lexsort(order)]
    pairs = group[reader[read]] * len(graph.ports) + port[read]
    is_first = np.zeros(len(read), dtype=bool)
    _, first, counts = np.unique(pairs, return_index=True, return_counts=True)
    is_first[first] = True
    firsts = zip(reader[read[first]].tolist(), counts.tolist(), strict=True)
    parts = {node: count for node, count in firsts if takes[node]}
    read = read[is_first | ~columns.is_fused[reader[read]]]
    is_alone = is_kernel.copy()
    is_alone[own[home[is_after]]] = False
    again = _read_again(graph, group, is_alone, port, in_memory, set(pairs.tolist()))
    operands: list[list[int]] = [[] for _ in graph.nodes]
    once = zip(reader[read].tolist(), columns.operand[read].tolist(), strict=True)
    for node, operand in (*once, *again):
        operands[node].append(operand)
    reads = [tuple(of_node) for of_node in operands]
    touches = np.zeros(num_nodes, dtype=bool)
    touches[reader[read]] = True
    touches[columns.maker[in_memory]] = True
    touches &= is_kernel[group]
    running = np.flatnonzero(touches & columns.is_op)
    running = running[np.argsort(columns.place[running])]
    launches = np.zeros(num_nodes, dtype=bool)
    launches[running[np.unique(group[running], return_index=True)[1]]] = True
    vector_ops = [0.0] * num_nodes
    if ops_per_byte < math.inf:
        found = _find_vector_ops(
            graph, group, reads, parts, in_memory, ops_per_byte, rates
        )
        found[is_of_matmul | ~is_kernel[group]] = 0.0
        vector_ops = found.tolist()
    is_converted = is_read & is_of_matmul[maker]
    return Kernels(
        reads,
        parts,
        launches.tolist(),
        vector_ops,
        _find_through(graph, materialised, port, is_inside, is_converted),
        _find_widened(graph, group, is_kernel, in_memory),
        _find_epilogues(graph, materialised),
        frozenset(np.flatnonzero(is_after).tolist()),
    )


def _fusions(
    graph: Graph, depth: MatmulDepth, materialised: Materialised
) -> np.ndarray:
    """Return [nodes], the first node of the fusion of each.

    Readers of one value in one level are one fusion, except those in a matmul's fusion;
    its producer belongs to that fusion where it runs in that level.
    """
    columns = graph.columns
    runs = np.array(_run_levels(graph, depth, materialised))
    is_fused = columns.is_fused[columns.target]
    fuses = columns.is_fusible.copy()
    fuses[list(materialised.inside)] = True
    makers = np.flatnonzero(fuses[columns.maker])
    node = np.concatenate([columns.target[is_fused], columns.maker[makers]])
    port = np.concatenate([read_ports(graph)[is_fused], makers])
    # A softmax whose exponential is an output of a separate program is three kernels,
    # a scatter into zeros is two.
    left = [*_left_exponentials(graph), *materialised.filled]
    parted = np.isin(port, left)
    single = np.where(parted, 1 + np.arange(len(port)), 0)
    alone = np.zeros(len(graph.nodes), dtype=np.int64)
    alone[list(graph.alone)] = list(graph.alone.values())
    alike = number_rows(
        port, runs[node], materialised.matmul_of[node] - NOWHERE, single, alone[node]
    )
    _, first = np.unique(alike, return_index=True)
    return united(len(graph.nodes), node, node[first[alike]])


def _left_exponentials(graph: Graph) -> Iterator[int]:
    """Yield the ports of exponentials that leave a separately compiled program and that
    a sum reads: the normalisation reads the stored value (HLO of a GPT's forward tasks:
    XLA:GPU of jax 0.10.2 writes, sums and divides them in a kernel each)."""
    for p in graph.crossing:
        node = graph.nodes[graph.ports[p].node]
        behind = (graph.nodes[e.target] for e in graph.readers[p])
        if node.op_kind is OpKind.EXPONENTIAL and any(map(sums, behind)):
            yield p


def _run_levels(
    graph: Graph, depth: MatmulDepth, materialised: Materialised
) -> list[int]:
    """Return [nodes], the level in which each runs: an op whose result is not stored
    runs in the level of its first reader."""
    nodes, runs = graph.nodes, list(depth.at)
    readers_of: list[list[int]] = [[] for _ in graph.ports]
    for port, edge in zip(read_ports(graph).tolist(), graph.edges, strict=True):
        readers_of[port].append(edge.target)
    for node in reversed(graph.run_order):
        fuses = node.is_fusible or node.id in materialised.inside
        if not fuses or materialised.ports[node.ports[0].id]:
            continue
        readers = readers_of[node.ports[0].id]
        fused = [runs[n] for n in readers if nodes[n].is_fused]
        if fused:
            runs[node.id] = min(fused)
    return runs


def _find_epilogues(graph: Graph, materialised: Materialised) -> dict[int, Epilogue]:
    """Return `Kernels.epilogues`."""
    of, sources = materialised.epilogue_of.tolist(), materialised.sources
    copied, maker = copied_ports(graph).tolist(), graph.columns.maker.tolist()
    reads, writes = dict[int, dict[int, int]](), dict[int, list[int]]()
    own, computing, reducing = dict[int, set[int]](), set[int](), set[int]()
    for port, edge in zip(read_ports(graph).tolist(), graph.edges, strict=True):
        home = of[edge.target]
        behind = sorted(copied[p] for p in sources[port])
        if graph.nodes[edge.target].hosts_fusion:
            own.setdefault(edge.target, set()).update(behind)
        elif home not in (NOWHERE, maker[port], of[maker[port]]):
            for source in behind:
                reads.setdefault(home, {}).setdefault(source, edge.time)
    for node in np.flatnonzero(materialised.epilogue_of != NOWHERE).tolist():
        stored = (p.id for p in graph.nodes[node].ports if materialised.ports[p.id])
        writes.setdefault(of[node], []).extend(stored)
        moving = OpKind.MOVEMENT, OpKind.CONVERSION
        if graph.nodes[node].op_kind not in moving:
            computing.add(of[node])
        if graph.nodes[node].op_kind is OpKind.REDUCTION:
            reducing.add(of[node])
    found = dict[int, Epilogue]()
    for home, written in writes.items():
        moved = {*written, *own.get(home, ()), *(p.id for p in graph.nodes[home].ports)}
        read = reads.get(home, {}).items()
        others = tuple((p, time) for p, time in read if p not in moved)
        does = home in computing, home in reducing
        found[home] = Epilogue(others, tuple(written), *does)
    return found


def _find_through(
    graph: Graph,
    materialised: Materialised,
    port: np.ndarray,
    is_inside: np.ndarray,
    is_converted: np.ndarray,
) -> dict[tuple[int, int], Through]:
    """Return `Kernels.through`.

    Args:
      graph: the program.
      materialised: which values touch memory.
      port: [edges], the port that is read.
      is_inside: [edges], whether a matmul's kernel computes the operand.
      is_converted: [edges], whether a kernel reads what a matmul's fusion stores.
    """
    found = dict[tuple[int, int], Through]()
    for e in np.flatnonzero(is_inside | is_converted).tolist():
        find = _computed if is_inside[e] else _converted
        if (of := find(graph, int(port[e]), materialised)) is not None:
            found[graph.edges[e].target, graph.edges[e].operand] = of
    return found


def _computed(graph: Graph, port: int, materialised: Materialised) -> Through:
    """Return what a matmul's kernel reads to compute an operand: of what is larger than
    the operand, as many elements."""
    own, read = graph.value(port), dict[int, int]()
    for source in sorted(materialised.sources[port]):
        value = graph.value(source)
        part = own.size * item_bytes(value.dtype)
        read[source] = min(value.bytes, part)
    largest = max(read, key=read.__getitem__, default=port)
    return Through(largest, sum(read.values()) / max(1, own.bytes))


def _converted(graph: Graph, port: int, materialised: Materialised) -> Through | None:
    """Return what is read of a value that a matmul's fusion stores in two types: its
    readers convert the one that the product has. None for all others."""
    node = graph.nodes[graph.ports[port].node]
    if node.op_kind is not OpKind.CONVERSION:
        return None
    (edge,) = graph.incoming[node.id]
    if not materialised.ports[edge.source.id]:
        return None
    ratio = graph.value(edge.source.id).bytes / max(1, graph.value(port).bytes)
    return Through(edge.source.id, ratio)


def _find_widened(
    graph: Graph, group: np.ndarray, is_kernel: np.ndarray, in_memory: np.ndarray
) -> dict[int, int]:
    """Return `Kernels.widened`: of a kernel's products the result, else of its
    reductions the operand, else of its elementwise ops the result; none of a
    convolution's kernel."""
    values, stored = graph.program.values, dict[int, int]()
    widest = dict[int, tuple[int, int, int, int]]()
    for node in graph.nodes:
        op, kernel = node.op, int(group[node.id])
        if node.kind is not NodeKind.OP or op is None or not is_kernel[kernel]:
            continue
        for port in node.ports:
            made = values[op.results[port.result]]
            if in_memory[port.id] and item_bytes(made.dtype) >= item_bytes("float32"):
                stored[kernel] = max(stored.get(kernel, 0), made.size)
        if op.traits.kind not in _RANKS:
            continue
        operand = 0 if op.traits.kind is OpKind.REDUCTION else NOWHERE
        value = values[(op.results if operand == NOWHERE else op.operands)[operand]]
        found = _RANKS[op.traits.kind], value.size, node.id, operand
        widest[kernel] = max(widest.get(kernel, found), found)
    return {
        node: operand
        for kernel, (rank, size, node, operand) in widest.items()
        if rank < _RANKS[OpKind.CONVOLUTION]
        and (operand != NOWHERE or stored.get(kernel, 0) < size)
    }


_RANKS = dict.fromkeys(ELEMENTWISE_KINDS, 0) | {
    OpKind.REDUCTION: 1,
    OpKind.CONTRACTION: 2,
    OpKind.CONVOLUTION: 3,
}
"""Kinds of ops of a kernel; of the last that it has is what is widened."""


def _takes_part(graph: Graph, node: Node) -> bool:
    """Whether a node takes a part of its first operand: a slice, or a look-up, which
    may take less on each device than a table that is replicated."""
    op, values = node.op, graph.program.values
    if op is None or node.op_kind is not OpKind.MOVEMENT:
        return looks_up(node)
    return values[node.value].size < values[op.operands[0]].size


def _find_vector_ops(
    graph: Graph,
    group: np.ndarray,
    reads: list[tuple[int, ...]],
    parts: dict[int, int],
    in_memory: np.ndarray,
    ops_per_byte: float,
    rates: KernelRates,
) -> np.ndarray:
    """Return `Kernels.vector_ops`, of the whole arrays: shards have as many operations
    per byte."""
    values = graph.program.values
    num_kernels = 2 * len(graph.nodes)
    ops, moved = np.zeros(num_kernels), np.zeros(num_kernels)
    per_flop, needed = np.zeros(len(graph.nodes)), _needed(graph, in_memory)
    for node in graph.nodes:
        op = node.op
        if node.kind is not NodeKind.OP or op is None or not node.is_fused:
            continue
        if op.traits.kind in (*ELEMENTWISE_KINDS, OpKind.REDUCTION):
            is_sum = op.traits.kind is OpKind.REDUCTION
            ops_of = min(op.traits.vector_ops, rates.special_ops)
            per_flop[node.id] = rates.reduce_ops if is_sum else ops_of
            per_flop[node.id] *= needed[node.id]
            ops[group[node.id]] += op.flops * per_flop[node.id]
        for i in reads[node.id]:
            whole = values[op.operands[i]].bytes
            part = parts.get(node.id, 0) * values[op.results[0]].bytes
            moved[group[node.id]] += min(whole, part) if part and not i else whole
        stored = [p.result for p in node.ports if in_memory[p.id]]
        moved[group[node.id]] += sum(values[op.results[i]].bytes for i in stored)
    return np.where((ops > ops_per_byte * moved)[group], per_flop, 0.0)


def _needed(graph: Graph, in_memory: np.ndarray) -> np.ndarray:
    """Return [nodes], the share of the elements of each node's result that its kernel
    computes: of a value that is not stored, those that slices and look-ups take."""
    values, needed = graph.program.values, np.ones(len(graph.nodes))
    for node in reversed(graph.run_order):
        if not node.is_fusible or in_memory[node.ports[0].id]:
            continue
        share, size = 0.0, values[node.value].size
        for reader in graph.nodes_behind(node.id):
            part = values[reader.value].size / max(1, size)
            share += needed[reader.id] * (part if _takes_part(graph, reader) else 1.0)
        needed[node.id] = min(1.0, share)
    return needed


def _read_again(
    graph: Graph,
    group: np.ndarray,
    is_kernel: np.ndarray,
    port: np.ndarray,
    in_memory: np.ndarray,
    read: set[int],
) -> Iterator[tuple[int, int]]:
    """Yield nodes and operands that further kernels read to compute a value of an
    earlier one once more, as the backward pass does with a normalisation.

    Args:
      graph: the program.
      group: [nodes], the kernel of each.
      is_kernel: [kernels], whether it is one of its own, see `find_kernels`.
      port: [edges], the port that is read.
      in_memory: [ports], whether the value is stored.
      read: kernels and ports of the reads that are known, as one number each.
    """
    columns, num_ports = graph.columns, len(graph.ports)
    maker, reader = columns.maker[port], columns.target
    computed = columns.is_fusible & ~in_memory[[n.ports[0].id for n in graph.nodes]]
    views = are_views(graph)
    crossing = computed[maker] & columns.is_fused[reader]
    crossing &= columns.is_op[reader] & ~views[reader]
    edges = np.flatnonzero(crossing)
    # Node → the other kernels that compute it, through its readers.
    kernels: dict[int, set[int]] = {}
    for edge in edges[
        np.argsort(-columns.place[reader[edges]], kind="stable")
    ].tolist():
        node, behind = int(maker[edge]), int(reader[edge])
        found = set(kernels.get(behind, ())) if computed[behind] else set()
        if is_kernel[group[behind]]:
            found.add(int(group[behind]))
        found.discard(int(group[node]))
        if found:
            kernels.setdefault(node, set()).update(found)
    for edge in np.flatnonzero(np.isin(reader, list(kernels))).tolist():
        node, source = int(reader[edge]), int(port[edge])
        if not in_memory[source] or views[node]:
            continue
        for kernel in sorted(kernels[node]):
            pair = kernel * num_ports + source
            if pair not in read and group[maker[edge]] != kernel:
                read.add(pair)
                yield node, int(columns.operand[edge])
