"""On-chip memory: which values a compiler keeps on the chip between kernels.

XLA's memory space assignment gives each value, from its producer to one reader after
the other, a place in a TPU's vector memory if one is free for all of that time; from
the first reader that it has none for, the value is in HBM. Values that save most for
their size come first: the benefit is the bytes of all accesses, weighted by the loops
around them (`Observed.loop_benefit`), over the square root of the value's own bytes
(xla/service/memory_space_assignment, buffer_interval_comparator.cc). Kernels need a
part of the memory for their own windows (`Observed.window_bytes`).

A carry of a loop is one buffer: what the body reads, the next value, and the result.
So are a stack, the values that are written into it, and slices that another loop reads
of it. A buffer that is there before a loop's body runs, and read in the body, is in one
memory until the loop ends. Some compilers keep no such buffer on the chip
(`Device.loops_on_chip`).

Values that leave the program are in HBM; carries and stacks are copied there. So is
updated state, while other updates run.

What is kept depends on the sizes of shards, and so on every value's sharding. Here it
is decided for the whole program at every power of two of shards, as if all values had
as many; an op asks for the number of its own shards.

Seen in HLO of v6e:2x2, libtpu 0.0.52 (layouts with `S(1)`): of two matmuls the value
between is kept up to 32 MiB, beside an operand as large; attention's scores of 64 MiB
are kept where nothing else is as large, and gradients of 32 MiB beside them are not.
Of loops on v5e and v6e, carries of up to 47 MiB with a next value as large, and stacks
of 48 MiB are kept, not of 96; of a flow's stacks one of 64 MiB beside three of 8 MiB.
On tpu7x carries of 14 MiB are, not of 16; on v4 and v5p none of 4 MiB.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence, Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.analysis.kernels import Kernels
from rhino_jax.analysis.uses import copied_ports
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.utils.union_find import united


MAX_SHARDS = 1 << 15
"""Largest number of shards that is distinguished from smaller ones."""


@dataclass(frozen=True, slots=True, eq=False)
class OnChip:
    """The values that stay in on-chip memory.

    Numbers of shards are sets of levels, as bits: bit k stands for 2**k shards of every
    value of the program.

    Attributes:
      reads: [nodes], for each operand that its kernel reads from memory, in the order
        of `Kernels.reads`, and then of `Kernels.epilogues`, the numbers of shards with
        which it is on the chip.
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
    stacked: AbstractSet[int],
    last: Sequence[int],
    capacity_bytes: int,
    most_shards: int,
    in_loops: bool,
) -> OnChip:
    """Decide which values stay in on-chip memory.

    Args:
      graph: the program.
      kernels: its memory reads.
      is_held: [ports], whether the value has a buffer of its own.
      stacked: ids of ports whose values are stored in the stack of a loop only.
      last: [ports], when it is read for the last time.
      capacity_bytes: on-chip memory of a device.
      most_shards: number of shards that a value has at most.
      in_loops: whether buffers may stay from one trip of a loop to the next.
    """
    sources = _sources(graph, kernels, last)
    is_written = [held or p in stacked for p, held in enumerate(is_held)]
    updated = _find_updated(graph)
    buffers = _find_buffers(graph, sources, is_written, stacked, updated)
    kept = {
        b: found
        for b, found in buffers.items()
        if found.size
        and found.times
        and (in_loops or not found.is_in_loop)
        and _may_stay(graph, found, updated)
    }
    order = sorted(kept, key=lambda b: -kept[b].benefit / math.sqrt(kept[b].size))
    until: dict[int, list[int]] = {b: [] for b in order}
    for level in range(min(MAX_SHARDS, most_shards).bit_length()):
        room = 2**level * room_bytes(capacity_bytes)
        used = np.zeros(graph.end + 2)
        for b in order:
            own = kept[b]
            until[b].append(_place(used, own.start, sorted(own.times), own.size, room))
        if all(until[b][-1] == max(kept[b].times) for b in order):
            break
    loops = graph.loops
    of_port = {p: b for b, found in kept.items() for p in found.ports}

    def shards(port: int, time: int) -> int:
        if (b := of_port.get(port)) is None:
            return 0
        time = _stays_until(loops, kept[b].start, time)
        # With more shards all values are kept.
        always = -1 << len(until[b])
        levels = (1 << level for level, end in enumerate(until[b]) if end >= time)
        return always + sum(levels)

    return OnChip(
        [tuple([shards(*x) for x in found]) for found in sources],
        [shards(p.id, _start(graph, p.id)) for p in graph.ports],
    )


def room_bytes(capacity_bytes: int) -> int:
    """Return the bytes of on-chip memory that values may take."""
    return max(0, capacity_bytes - OBSERVED.window_bytes)


@dataclass(slots=True, eq=False)
class _Buffer:
    """Ports whose values are in one place.

    Attributes:
      ports: their ids.
      size: bytes of the largest.
      start: when the first is written.
      times: when each read ends, see `_stays_until`.
      benefit: bytes that kernels read and write, weighted by the loops around them.
      is_in_loop: whether it is there from one trip of a loop to the next.
    """

    ports: list[int] = field(default_factory=list)
    size: float = 0.0
    start: int = sys.maxsize
    times: set[int] = field(default_factory=set)
    benefit: float = 0.0
    is_in_loop: bool = False


def _find_buffers(
    graph: Graph,
    sources: Sequence[Sequence[tuple[int, int]]],
    is_written: Sequence[bool],
    stacked: AbstractSet[int],
    updated: AbstractSet[int],
) -> dict[int, _Buffer]:
    """Return the buffers of all ports, by the first port of each.

    Args:
      graph: the program.
      sources: what kernels read, see `_sources`.
      is_written: [ports], whether the value is written to memory.
      stacked: as in `find_on_chip`.
      updated: see `_find_updated`.
    """
    firsts, loops = _first_ports(graph, stacked), graph.loops
    found: dict[int, _Buffer] = {}
    depth = np.zeros(graph.end + 2)
    for start, end in loops:
        depth[start + 1 : end] += 1
    weight = OBSERVED.loop_benefit**depth
    for port in graph.ports:
        kind = graph.nodes[port.node].kind
        own = found.setdefault(firsts[port.id], _Buffer())
        own.ports.append(port.id)
        if kind is NodeKind.OP and not is_written[port.id]:
            continue
        size = graph.value(port.id).bytes
        own.size, start = max(own.size, size), _start(graph, port.id)
        own.start = min(own.start, start)
        own.is_in_loop |= kind in _BORDERS
        if kind is NodeKind.OP:
            own.benefit += size * weight[start]
            if port.id in updated:
                own.times.add(start + 1)  # copied out, while other updates run
        elif kind in (NodeKind.CARRY, NodeKind.STACK):
            own.times.add(graph.loop_end[port.node])
    for read, time in {pair for of_node in sources for pair in of_node}:
        own = found[firsts[read]]
        own.times.add(_stays_until(loops, own.start, time))
        own.benefit += graph.value(read).bytes * weight[time]
    return found


def _find_updated(graph: Graph) -> set[int]:
    """Return the ids of the ports of elementwise ops that are fed back as state; none
    where a program has only few."""
    found = {
        edge.source.id
        for edge in graph.edges
        if graph.nodes[edge.target].kind is NodeKind.INPUT
        if graph.nodes[edge.source.node].is_fusible
    }
    return found if len(found) >= OBSERVED.least_state else set()


_BORDERS = NodeKind.CARRY, NodeKind.CONST, NodeKind.SLICE, NodeKind.STACK


def _first_ports(graph: Graph, stacked: AbstractSet[int]) -> np.ndarray:
    """Return [ports], the first port of the buffer of each."""
    copied, same = copied_ports(graph), list[tuple[int, int]]()
    for edge in graph.edges:
        node, port = graph.nodes[edge.target], int(copied[edge.source.id])
        is_next = node.kind is NodeKind.CARRY and edge.time == graph.loop_end[node.id]
        is_read = node.kind in (NodeKind.SLICE, NodeKind.CONST)
        if is_next or is_read or (node.kind is NodeKind.STACK and port in stacked):
            same.append((port, node.ports[0].id))
    carries = [n for n in graph.nodes if n.kind is NodeKind.CARRY]
    same += [(n.ports[0].id, n.ports[-1].id) for n in carries]
    return united(len(graph.ports), *np.array(same, dtype=int).reshape(-1, 2).T)


def _stays_until(loops: Sequence[tuple[int, int]], start: int, time: int) -> int:
    """Return until when a buffer that is written at `start` stays in one memory where
    it is read at `time`: to the end of the outermost loop between the two."""
    ends = (end for begin, end in loops if start <= begin < time < end)
    return max(ends, default=time)


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


def _may_stay(graph: Graph, buffer: _Buffer, updated: AbstractSet[int]) -> bool:
    """Whether the program computes a buffer, and none but ops and loops read it, or
    what is read of it elsewhere is a carry, a stack or updated state."""
    kinds = {graph.nodes[graph.ports[p].node].kind for p in buffer.ports}
    if kinds & {NodeKind.CARRY, NodeKind.STACK}:
        return True
    edges = (e for p in buffer.ports for e in graph.readers[p])
    read = {graph.nodes[e.target].kind for e in edges}
    if not updated.isdisjoint(buffer.ports):
        read.discard(NodeKind.INPUT)
    return NodeKind.OP in kinds and read <= {NodeKind.OP, NodeKind.COPY, *_BORDERS}


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
            through = kernels.through.get((node.id, i))
            port = copied[of[i]] if through is None else through.port
            is_again = i in reads[:k]
            at.append((port, last[port] if is_again else node.time))
        if (epilogue := kernels.epilogues.get(node.id)) is not None:
            at += epilogue.reads
        found.append(tuple(at))
    return found
