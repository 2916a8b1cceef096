"""On-chip memory: which values a compiler keeps on the chip between kernels.

XLA's memory space assignment gives each value, from its producer to one reader after
the other, a place in a TPU's vector memory if one is free for all of that time; from
the first reader that it has none for, the value is in HBM. Values that save most for
their size come first: those of more accesses, and of these the larger (the benefit is
in proportion to accesses times bytes, and is divided by the square root of the bytes:
xla/service/memory_space_assignment/buffer_interval_comparator.cc). Kernels need a part
of the memory for their own windows (`Observed.window_share`).

A value that a loop stacks, that leaves the program or enters a loop is in HBM.

What is kept depends on the sizes of shards, and so on every value's sharding. Here it
is decided for the whole program at every power of two of shards, as if all values had
as many; an op asks for the number of its own shards.

Seen in HLO of v6e:2x2, libtpu 0.0.52 (layouts with `S(1)`): of two matmuls the value
between is kept up to 32 MiB, beside an operand as large; attention's scores of 64 MiB
are kept where nothing else is as large, and gradients of 32 MiB beside them are not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind, Port
from rhino_jax.analysis.kernels import Kernels
from rhino_jax.analysis.uses import NOWHERE, copied_ports
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.ir.program import Value


MAX_SHARDS = 1 << 15
"""Largest number of shards that is distinguished from smaller ones."""


@dataclass(frozen=True, slots=True, eq=False)
class OnChip:
    """The values that stay in on-chip memory.

    Numbers of shards are sets of levels, as bits: bit k stands for 2**k shards of every
    value of the program.

    Attributes:
      reads: [nodes], for each operand that its kernel reads from memory, in the order
        of `Kernels.reads`, the numbers of shards with which it is on the chip.
      writes: [ports], the numbers of shards with which the value is written there.
    """

    reads: Sequence[tuple[int, ...]]
    writes: Sequence[int]

    def of(self, node: Node) -> Hashable:
        """Return what is on the chip of one node's operands and results."""
        return self.reads[node.id], tuple([self.writes[p.id] for p in node.ports])


def is_kept(shards: int, shares: np.ndarray) -> np.ndarray:
    """Return [shares], whether a value is on the chip.

    Args:
      shards: numbers of shards with which it is, as in `OnChip`.
      shares: local over whole size.
    """
    level = np.rint(-np.log2(np.clip(shares, 1 / MAX_SHARDS, 1.0))).astype(np.int64)
    return (shards >> level) & 1 == 1


def find_on_chip(
    graph: Graph,
    kernels: Kernels,
    is_held: Sequence[bool],
    last: Sequence[int],
    capacity_bytes: int,
    most_shards: int,
) -> OnChip:
    """Decide which values stay in on-chip memory.

    Args:
      graph: the program.
      kernels: its memory reads.
      is_held: [ports], whether the value has a buffer of its own.
      last: [ports], when it is read for the last time.
      capacity_bytes: on-chip memory of a device.
      most_shards: number of shards that a value has at most.
    """
    sources = _sources(graph, kernels, last)
    times: list[set[int]] = [set() for _ in graph.ports]
    for found in sources:
        for port, time in found:
            times[port].add(time)
    reads = {
        p.id: sorted(times[p.id])
        for p in graph.ports
        if is_held[p.id] and times[p.id] and _may_stay(graph, p)
    }
    size = {p: float(_value_of(graph, graph.ports[p]).bytes) for p in reads}
    order = sorted(reads, key=lambda p: -(1 + len(reads[p])) * math.sqrt(size[p]))
    until: dict[int, list[int]] = {p: [] for p in order}
    for level in range(min(MAX_SHARDS, most_shards).bit_length()):
        room = 2**level * capacity_bytes * (1 - OBSERVED.window_share)
        used = np.zeros(graph.end + 2)
        for p in order:
            until[p].append(_place(used, _start(graph, p), reads[p], size[p], room))
        if all(until[p][-1] == reads[p][-1] for p in order):
            break

    def shards(port: int, time: int) -> int:
        if (kept := until.get(port)) is None:
            return 0
        # With more shards all values are kept.
        always = -1 << len(kept)
        return always + sum(1 << level for level, end in enumerate(kept) if end >= time)

    return OnChip(
        [tuple([shards(*x) for x in found]) for found in sources],
        [shards(p.id, _start(graph, p.id)) for p in graph.ports],
    )


def _place(
    used: np.ndarray, start: int, reads: Sequence[int], size: float, room: float
) -> int:
    """Reserve memory for a value until it finds none, and return when it is last read
    from there; -1 if it is not written there.

    Args:
      used: [times], bytes that are reserved.
      start: when it is written.
      reads: when it is read, ascending.
      size, room: bytes of the value, and of the memory.
    """
    at, until = start, -1
    for time in reads:
        life = used[at : time + 1]
        if size + life.max(initial=0.0) > room:
            break
        life += size
        at, until = time + 1, time
    return until


def _start(graph: Graph, port: int) -> int:
    node = graph.nodes[graph.ports[port].node]
    return graph.loop_start.get(node.id, node.time)


def _value_of(graph: Graph, port: Port) -> Value:
    node = graph.nodes[port.node]
    op_results = node.op.results if node.op else ()
    number = op_results[port.result] if node.kind is NodeKind.OP else node.value
    return graph.program.values[number]


def _is_computed(graph: Graph, port: int) -> bool:
    kind = graph.nodes[graph.ports[port].node].kind
    return kind in (NodeKind.OP, NodeKind.CARRY)


def _may_stay(graph: Graph, port: Port) -> bool:
    """Whether an op or a loop's body computes the value, and only ops and the loop's
    next trip read it."""
    if not _is_computed(graph, port.id):
        return False
    read = {graph.nodes[e.target].kind for e in graph.readers[port.id]}
    return read <= {NodeKind.OP, NodeKind.COPY, NodeKind.CARRY}


def _sources(
    graph: Graph, kernels: Kernels, last: Sequence[int]
) -> list[tuple[tuple[int, int], ...]]:
    """Return [nodes], for each operand that a kernel reads its port and the time. An
    operand that another kernel reads again, to compute a value once more, is read when
    it is last needed."""
    copied = copied_ports(graph).tolist()
    found: list[tuple[tuple[int, int], ...]] = []
    for node in graph.nodes:
        reads, at = kernels.reads[node.id], list[tuple[int, int]]()
        of = {e.operand: e.source.id for e in graph.incoming[node.id]} if reads else {}
        for k, i in enumerate(reads):
            port = of[i] if copied[of[i]] == NOWHERE else copied[of[i]]
            is_again = i in reads[:k]
            at.append((port, last[port] if is_again else node.time))
        found.append(tuple(at))
    return found
