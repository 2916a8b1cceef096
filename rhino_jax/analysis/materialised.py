"""Materialisation: which values touch memory, after the fusion passes of the compilers.

A fusible op's result stays in registers where one fusion can contain the op and its
readers; it touches memory where an op that cannot fuse reads it, or where it leaves a
loop or the program. Read by several ops of another depth (see `matmul_depth`), it is
recomputed in each reader's fusion where that is cheap and reads no more bytes than the
value has itself (a convert, a mask, a normalisation); otherwise it is stored.

Where rotations are fused, too (`Device.fuses_rotations`), a value that is computed
through one and that several ops read ends a fusion.

Some compilers fuse elementwise ops into matmuls (`Device.fuses_matmuls`). Operands are
then computed on the fly. A value that several matmuls read is stored, unless computing
it reads no more bytes than it has; one that is expensive, and read by a matmul's fusion
and by other ops, is stored too. The elementwise ops on a matmul's result fuse into its
epilogue, up to the first value whose readers do not meet again, which is stored in
place of the result; each of these readers converts it itself. An op with a larger
result, as an outer product with it, does not fuse into it. Reductions of what the
epilogue computes, or of what is computed from it and from earlier values, run in it.

Such a fusion holds whole rows of a softmax, and stores their exponentials; of many
queries with many keys (`Observed.most_scores`), it stores the scores, and a second
kernel their exponentials. Of some softmaxes (see `analysis.softmax_rows`) the matmul's
own result is stored, and everything between it and the next matmul is recomputed by
each reader, expensive or not.

Some compilers fuse by the bytes that this saves (`Device.fuses_by_bytes`). A look-up is
then fusible, and computes of what it reads the elements that it picks: logits that
only a softmax and its labels' look-up convert to float32 stay in bfloat16. And of a
chain of elementwise ops with readers in several kernels, the narrowest value is stored:
a residual sum in bfloat16 rather than its difference from the mean in float32.

Some compilers compute an elementwise result that a loop stacks where it is written, in
the stack itself (`Fusing.stacks_in_place`): it has no buffer of its own, unless another
reader needs it in memory or would have to recompute something expensive.

A constant's broadcast that a loop reads, such as what masks attention's scores (JAX
moves it out of a scan's body), is sunk into the loop by some compilers
(`Device.sinks_broadcasts`); others store it until the loop ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rhino_jax.analysis.fusing import Fusing
from rhino_jax.analysis.graph import Graph, Node, NodeKind, Port
from rhino_jax.analysis.matmul_depth import MatmulDepth
from rhino_jax.analysis.short_sums import find_short_sums
from rhino_jax.analysis.softmax_rows import find_stored_scores
from rhino_jax.analysis.uses import (
    NOWHERE,
    PortReads,
    Readers,
    copied_ports,
    find_filled,
    find_scattered_onto,
    find_selects,
    looks_up,
    read_ports,
)
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.ir.traits import OpKind


@dataclass(frozen=True, slots=True, eq=False)
class Materialised:
    """The values of a graph that touch memory.

    Attributes:
      ports: [ports], whether their values touch memory; False for ports that were not
        to be decided.
      handed: ids of the ports that are stored only because they enter or leave a
        separately compiled program.
      stacked: ids of the ports that are stored in the stack of a loop only.
      filled: see `find_filled`.
      inside: ids of the nodes that run inside of their readers, though they do not
        fuse elsewhere: short reductions.
      matmul_of: [nodes], id of the matmul whose fusion an elementwise node, or a
        reduction, runs in, or NOWHERE.
      epilogue_of: [nodes], the same of those that run after the matmul.
      sources: [ports], of a port that is not stored the stored ports that computing it
        reads.
    """

    ports: list[bool]
    handed: frozenset[int]
    stacked: frozenset[int]
    filled: frozenset[int]
    inside: frozenset[int]
    matmul_of: np.ndarray
    epilogue_of: np.ndarray
    sources: list[frozenset[int]]


def find_materialised(
    graph: Graph,
    ports: np.ndarray,
    depth: MatmulDepth,
    fusing: Fusing,
) -> Materialised:
    """Decide which values are stored, before any sharding is chosen.

    Args:
      graph: the program.
      ports: ids of the ports to decide for.
      depth: of its nodes.
      fusing: how the compiler fuses.
    """
    finder, columns = _MaterialisedFinder(graph, depth, fusing), graph.columns
    order = np.lexsort((ports, columns.time[columns.maker[ports]]))
    for port in ports[order].tolist():
        finder.decide(graph.ports[port])
    before, after = np.full((2, len(graph.nodes)), NOWHERE)
    before[list(finder.before)] = list(finder.before.values())
    for of in (finder.after, finder.summing):
        after[list(of)] = list(of.values())
    found = finder.materialised
    return Materialised(
        found,
        frozenset(finder.handed),
        frozenset(finder.stacked),
        finder.filled,
        frozenset(n for n in finder.short if not found[graph.nodes[n].ports[0].id]),
        np.where(after == NOWHERE, before, after),
        after,
        finder.sources,
    )


_NONE: frozenset[int] = frozenset()


class _MaterialisedFinder:
    """The state of the decisions, which are taken port by port in program order.

    Attributes:
      graph, depth, fusing: as in `find_materialised`.
      readers: the readers of every port.
      feeds: [nodes], ids of the ports that each reads.
      before: node id → the only matmul that reads it, if only through fusible nodes.
      after: node id → the matmul whose result it computes on, before that is stored.
      materialised: [ports], the decisions.
      sources: [ports], itself for a port that is stored; for others, the stored ports
        that computing it reads.
      dear: ids of the ports whose computation from their sources includes an expensive
        op.
      unsettled: port id → the matmul whose fusion computes its value and has not stored
        one yet.
      handed, stacked, filled: as in `Materialised`.
      scores: ids of nodes of softmaxes whose scores are stored, and of the matmuls
        before them, see `softmax_rows`.
      reading: how every port is read.
      looks_up: [nodes], look-ups that fuse with elementwise ops.
      short: ids of short reductions, and of scatters that are selections, see
        `find_short_sums` and `find_selects`.
      summing: reduction → the matmul in whose fusion it runs.
      copied: see `copied_ports`.
    """

    def __init__(self, graph: Graph, depth: MatmulDepth, fusing: Fusing) -> None:
        self.graph, self.depth, self.fusing = graph, depth, fusing
        self.readers, self.copied = Readers.of(graph), copied_ports(graph)
        self.feeds: list[list[int]] = [[] for _ in graph.nodes]
        self.after, self.summing = dict[int, int](), dict[int, int]()
        self.dear, self.unsettled = set[int](), dict[int, int]()
        self.handed, self.stacked = set[int](), set[int]()
        with_matmuls, by_bytes = fusing.with_matmuls, fusing.by_bytes
        selects = find_selects(graph) if with_matmuls else _NONE
        onto = find_scattered_onto(graph)
        onto = {k: node for k, node in onto.items() if node not in selects}
        for port, edge in zip(read_ports(graph).tolist(), graph.edges, strict=True):
            if (edge.target, edge.source.id) not in onto:
                self.feeds[edge.target].append(port)
        self.materialised = [False] * len(graph.ports)
        self.sources = [frozenset((p,)) for p in range(len(graph.ports))]
        self.looks_up = np.array(
            [by_bytes and looks_up(n) for n in graph.nodes], dtype=bool
        )
        self.short = selects | (find_short_sums(graph) if by_bytes else _NONE)
        self.filled = find_filled(graph, onto.values())
        self.before, self.scores = dict[int, int](), set[int]()
        if with_matmuls:
            self.before = self._find_before()
            self.scores = find_stored_scores(graph, self.readers, self.feeds)
        self.reading = PortReads.of(
            self.readers,
            graph.columns,
            self.depth,
            self.before,
            with_matmuls,
            self.looks_up,
        )

    def decide(self, port: Port) -> None:
        """Decide whether a port is stored; all ports computed before it have been
        decided."""
        node, here = self.graph.nodes[port.node], port.id
        feeds = self.feeds[port.node]
        if self.unsettled:
            self._settle_matmuls(feeds)
        if self._is_expensive(node) or not self._is_cheap(feeds):
            self.dear.add(here)
        if (home := self._reduced_in(node, feeds)) is not None:
            self.summing[node.id] = home
        if self._is_sunk(node, feeds):
            keep = False
        elif (matmul := self._matmul_behind(node, feeds)) is not None:
            keep = self._ends_fusion(here, node)
            if not keep:
                self.unsettled[here] = matmul
        else:
            is_shared = self._is_shared(here, node, feeds)
            if is_shared and self.fusing.by_bytes and node.id not in self.depth.rotated:
                is_shared = not self._stores_narrower(here)
            is_short = node.id in self.short and not self._reads_more(here, feeds)
            fuses = node.is_fusible or self.looks_up[node.id] or is_short
            is_needed = self.reading.is_needed[here]
            if here in self.filled:
                is_needed = self.fusing.by_bytes
            keep = not fuses or is_needed or is_shared
            is_last = node.is_fusible and not self.reading.is_needed_unstacked[here]
            if keep and self.fusing.stacks_in_place and is_last and not is_shared:
                self.stacked.add(here)
        if keep and _converts(node) and self.fusing.with_matmuls:
            # A second result of the matmul's fusion.
            maker = self.graph.nodes[self.graph.ports[feeds[0]].node]
            if maker.is_matmul:
                self.after[node.id] = maker.id
        if not keep and here in self.graph.crossing:
            self.unsettled.pop(here, None)
            self.handed.add(here)
            keep = True
        self.materialised[here] = keep
        # A look-up reads as many elements as it has, wherever they are.
        if not keep and not self.looks_up[node.id]:
            self.sources[here] = self._sources_of(feeds)

    def _stores_narrower(self, port: int) -> bool:
        """Store, in place of a shared value, the last one with fewer bytes that each of
        its readers can compute it from; return whether there is one.

        Between the two all is cheap, and nothing else of this size is read.
        """
        size, at = self._size_of(port), port
        spare = (OBSERVED.recompute_share - 1) * size
        while self.graph.nodes[self.graph.ports[at].node].is_fusible:
            node = self.graph.nodes[self.graph.ports[at].node]
            if self._is_expensive(node):
                return False
            feeds = self.feeds[node.id]
            large = [p for p in dict.fromkeys(feeds) if self._size_of(p) > spare]
            if len(large) != 1 or self.materialised[large[0]]:
                return False
            beside = self._sources_of([p for p in feeds if p != large[0]])
            if sum(map(self._size_of, beside)) > spare:
                return False
            (at,) = large
            if self.graph.value(at).bytes < self.graph.value(port).bytes:
                self._store(at)
                return True
        return False

    def _store(self, port: int) -> None:
        """Store a port for which something else was decided."""
        self._end_at(port)
        todo = [port]
        while todo:
            readers = self.readers.of_port(todo.pop())
            for node in (self.graph.nodes[n] for n in readers):
                here, feeds = node.ports[0].id, self.feeds[node.id]
                if node.is_fusible and not self.materialised[here]:
                    found = self._sources_of(feeds)
                    if found != self.sources[here]:
                        self.sources[here] = found
                        todo.append(here)

    def _sources_of(self, feeds: list[int]) -> frozenset[int]:
        return _NONE.union(*[self.sources[p] for p in feeds])

    def _is_cheap(self, feeds: list[int]) -> bool:
        """Whether computing a value from these ports recomputes nothing expensive."""
        return self.dear.isdisjoint(feeds) or all(
            self.materialised[p] for p in self.dear.intersection(feeds)
        )

    def _is_expensive(self, node: Node) -> bool:
        op = node.op
        if op is None or not op.traits.is_expensive or node.id in self.scores:
            return False
        dtype = self.graph.program.values[op.results[0]].dtype
        return self.fusing.recomputes.isdisjoint((op.name, f"{op.name}.{dtype}"))

    def _is_shared(self, port: int, node: Node, feeds: list[int]) -> bool:
        """Whether a value is stored rather than recomputed by each of its readers."""
        if node.id in self.depth.rotated:
            return True
        if self.reading.count[port] < 2 or node.id in self.scores:
            return False
        if self.looks_up[node.id]:
            return False
        reads_more = self._reads_more(port, feeds)
        is_dear = reads_more or self._is_expensive(node)
        is_far = self.reading.deepest[port] > self.depth.at[node.id]
        return (is_dear and (is_far or self.reading.is_parted[port])) or (
            self.reading.num_matmuls[port] > 1 and (reads_more or port in self.dear)
        )

    def _reads_more(self, port: int, feeds: list[int]) -> bool:
        """Whether computing a value reads more than the value has."""
        read = sum(map(self._size_of, self._sources_of(feeds)))
        return read > OBSERVED.recompute_share * self._size_of(port)

    def _matmul_behind(self, node: Node, feeds: list[int]) -> int | None:
        """Return the matmul whose fusion this node continues, or None."""
        if not self.fusing.with_matmuls:
            return None
        if node.hosts_fusion:
            return node.id
        found = [p for p in feeds if p in self.unsettled] if node.is_fusible else []
        if not found:
            return None
        largest = OBSERVED.recompute_share * max(map(self._size_of, found))
        if self._size_of(node.ports[0].id) > largest:
            for port in found:
                self._end_at(port)
            return None
        self.after[node.id] = self.unsettled[found[-1]]
        return self.after[node.id]

    def _ends_fusion(self, port: int, node: Node) -> bool:
        """Whether a matmul's fusion stores its result at this port."""
        reading = self.reading
        if reading.ends_fusion[port] or reading.feeds_matmul[port]:
            return True
        if not reading.count[port]:
            return True
        if node.hosts_fusion and node.id in self.scores:
            return True
        if _converts(node) or len(self._parting(port)) < 2:
            return False
        return not self._converges(port)

    def _converges(self, port: int) -> bool:
        """Whether all that is computed from a port leads to one value, through
        elementwise ops and the maxima of rows: one kernel computes it all."""
        nodes, columns = self.graph.nodes, self.graph.columns
        todo = set(self._parting(port))
        for _ in range(OBSERVED.most_followed):
            if len(todo) < 2:
                break
            node = nodes[min(todo, key=columns.place.__getitem__)]
            if not (node.is_fusible or self._is_row_max(node)):
                return False
            todo.remove(node.id)
            todo.update(self.readers.of_port(node.ports[0].id))
        return len(todo) == 1 and nodes[min(todo)].is_fusible

    def _is_row_max(self, node: Node) -> bool:
        """Whether a node is the maximum of rows that a matmul's fusion holds whole."""
        op = node.op
        if op is None or op.rule is None or node.op_kind is not OpKind.REDUCTION:
            return False
        factors = op.rule.factors
        reduced = [f for f in range(len(factors)) if factors[f].reducer]
        is_max = all(factors[f].reducer == "max" for f in reduced)
        is_row = op.rule.operands[0][-1:] == (tuple(reduced),)
        row = math.prod(factors[f].size for f in reduced)
        queries = self.graph.program.values[op.results[0]].shape[-1:]
        is_held = math.prod(queries) * row <= OBSERVED.most_scores
        return is_max and is_row and row <= OBSERVED.longest_row and is_held

    def _reduced_in(self, node: Node, feeds: list[int]) -> int | None:
        """Return the matmul in whose fusion a reduction runs: that which computes its
        operand, where nothing else that it reads is computed after the matmul."""
        is_reduction = node.op_kind is OpKind.REDUCTION
        if not self.fusing.with_matmuls or not is_reduction or not feeds:
            return None
        if feeds[0] in self.unsettled:
            return self.unsettled[feeds[0]]
        place, nodes = self.graph.columns.place, self.graph.nodes
        least = self._size_of(feeds[0]) / OBSERVED.recompute_share
        homes, makers = list[int](), list[int]()
        for port in self._sources_of(feeds):
            port = int(self.copied[port])
            maker = nodes[self.graph.ports[port].node]
            home = maker.id if maker.is_matmul else self.after.get(maker.id, NOWHERE)
            is_home = home != NOWHERE and self._size_of(port) >= least
            (homes if is_home else makers).append(home if is_home else maker.id)
        if not homes:
            return None
        last = max(homes, key=place.__getitem__)
        is_late = any(place[n] > place[last] for n in makers)
        return None if is_late or nodes[last].count != node.count else last

    def _parting(self, port: int) -> list[int]:
        """Return the readers of a port, looking through conversions."""
        found: list[int] = []
        for reader in self.readers.of_port(port):
            node = self.graph.nodes[reader]
            found += self._parting(node.ports[0].id) if _converts(node) else [reader]
        return found

    def _settle_matmuls(self, feeds: list[int]) -> None:
        """Store all but the last of several matmul results that one op reads: its
        fusion contains only one of the matmuls."""
        unsettled = [p for p in feeds if p in self.unsettled]
        for port in unsettled[:-1]:
            if self.unsettled[port] != self.unsettled[unsettled[-1]]:
                self._end_at(port)

    def _end_at(self, port: int) -> None:
        """Store a value: the fusion that computes it ends there."""
        self.materialised[port] = True
        self.sources[port] = frozenset((port,))
        self.unsettled.pop(port, None)

    def _is_sunk(self, node: Node, feeds: list[int]) -> bool:
        """Whether a loop recomputes the value in each trip: a broadcast of something
        small, or the border node of one."""
        if node.kind is NodeKind.CONST:
            return not any(self.materialised[p] for p in feeds)
        if not self.fusing.sinks_broadcasts or node.op_kind is not OpKind.BROADCAST:
            return False
        readers = [self.graph.nodes[n] for n in self.readers.of_port(node.ports[0].id)]
        return any(n.kind is NodeKind.CONST for n in readers) and all(
            n.kind is NodeKind.CONST or n.is_fusible for n in readers
        )

    def _find_before(self) -> dict[int, int]:
        """Return, for every fusible node that only one matmul reads, through any number
        of fusible nodes, that matmul."""
        found: dict[int, int] = {}
        hosts_fusion = self.graph.columns.hosts_fusion.tolist()
        for node in reversed(self.graph.run_order):
            if not node.is_fusible or node.ports[0].id in self.graph.crossing:
                continue
            readers = self.readers.of_port(node.ports[0].id)
            homes = {n if hosts_fusion[n] else found.get(n) for n in readers}
            home = homes.pop() if len(homes) == 1 else None
            if home is not None:
                found[node.id] = home
        return found

    def _size_of(self, port: int) -> int:
        return self.graph.value(port).size


def _converts(node: Node) -> bool:
    return node.op_kind is OpKind.CONVERSION
