"""Which values touch memory, as the fusion passes of the compilers have it.

A fusible op's result goes through registers where one fusion can hold it and its
readers; it touches memory where an op that cannot fuse reads it, or where it leaves
a loop or the program. Read by several ops of another depth (see `matmul_depth`), it
is computed again by each reader's fusion where that is cheap and reads no more bytes
than the value has itself (a convert, a mask, a normalisation); else it is kept.

Some compilers fuse elementwise ops into matmuls (`Device.fuses_matmuls`). Operands are
then computed on the fly. A value that several matmuls read is kept, unless computing it
reads no more bytes than it has; one that is expensive, and read by a matmul's fusion
and by other ops, is kept too. What is computed from a matmul's result is stored instead
of the result, up to the value that several ops read; each of these converts it itself.

Such a fusion holds whole rows of a softmax. Where they are longer than it can hold
(`Observed.longest_row`), the matmul's own result is stored, and everything between it
and the next matmul is computed again by each reader, expensive or not.

A constant's broadcast that a loop reads is made inside of it
(xla/service/while_loop_constant_sinking.cc).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind, Port
from rhino_jax.analysis.matmul_depth import MatmulDepth
from rhino_jax.analysis.uses import NOWHERE, PortReads, Readers, read_ports
from rhino_jax.hardware.observed import OBSERVED
from rhino_jax.hardware.target import Device
from rhino_jax.ir.traits import OpKind


@dataclass(frozen=True, slots=True)
class Fusing:
    """How a compiler fuses.

    Attributes:
      with_matmuls: whether a matmul's fusion computes its elementwise operands, and
        what is elementwise in its result.
      recomputes: names of expensive ops that are computed again where others are kept,
        and "name.dtype" of those of one element type (`Device.recomputes`).
      hoists_conversions: see `hoisting`.
      parts_columns: whether what reads a reduction over other dims than the last runs
        in another fusion (`Device.parts_columns`).
      masks_groups: see `masked_groups`.
    """

    with_matmuls: bool = False
    recomputes: frozenset[str] = frozenset()
    hoists_conversions: bool = False
    parts_columns: bool = False
    masks_groups: bool = False

    @classmethod
    def of(cls, device: Device) -> Fusing:
        return cls(
            device.fuses_matmuls,
            frozenset(device.recomputes),
            device.hoists_conversions,
            device.parts_columns,
            device.masks_groups,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Materialised:
    """Attributes:
    ports: [ports], whether their values touch memory; not where it was not asked.
    handed: of these, what is stored only because it enters or leaves what is compiled
        on its own.
    matmul_of: [nodes], the matmul whose fusion an elementwise node runs in, or NOWHERE.
    """

    ports: list[bool]
    handed: frozenset[int]
    matmul_of: np.ndarray


def find_materialised(
    graph: Graph,
    ports: np.ndarray,
    depth: MatmulDepth,
    fusing: Fusing,
) -> Materialised:
    """Decide what is stored, before any sharding is chosen.

    Args:
      graph: the program.
      ports: of which values it is asked.
      depth: of its nodes.
      fusing: how the compiler fuses.
    """
    finder, columns = _MaterialisedFinder(graph, depth, fusing), graph.columns
    order = np.lexsort((ports, columns.time[columns.maker[ports]]))
    for port in ports[order].tolist():
        finder.decide(graph.ports[port])
    matmul_of = np.full(len(graph.nodes), NOWHERE)
    for found in (finder.before, finder.after):
        matmul_of[list(found)] = list(found.values())
    return Materialised(finder.materialised, frozenset(finder.handed), matmul_of)


_NONE: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class _MaterialisedFinder:
    """Attributes:
    graph, depth, fusing: as of `find_materialised`.
    readers: of every port.
    feeds: of every node, the ports that it reads.
    before: node → the only matmul that reads it, if only through fusible nodes.
    after: node → the matmul whose result it computes on, before that is stored.
    materialised: [ports], what was decided.
    sources: [ports], of one that is stored itself, of others the stored ones that
        making it reads.
    dear: ports that are made from their sources by an expensive op, among others.
    unsettled: port → the matmul whose fusion makes its value and has not stored it yet.
    handed: what is stored because it enters or leaves a program, and else were not.
    long_rows: nodes of softmaxes whose rows no fusion holds, and the matmuls before.
    reading: how every port is read.
    """

    graph: Graph
    depth: MatmulDepth
    fusing: Fusing
    readers: Readers = field(init=False)
    feeds: list[list[int]] = field(init=False)
    before: dict[int, int] = field(init=False)
    after: dict[int, int] = field(default_factory=dict)
    materialised: list[bool] = field(init=False)
    sources: list[frozenset[int]] = field(init=False)
    dear: set[int] = field(default_factory=set)
    unsettled: dict[int, int] = field(default_factory=dict)
    handed: set[int] = field(default_factory=set)
    long_rows: set[int] = field(init=False)
    reading: PortReads = field(init=False)

    def __post_init__(self) -> None:
        graph = self.graph
        self.readers = Readers.of(graph)
        self.feeds = [[] for _ in graph.nodes]
        for port, edge in zip(read_ports(graph).tolist(), graph.edges, strict=True):
            self.feeds[edge.target].append(port)
        self.materialised = [False] * len(graph.ports)
        self.sources = [frozenset((p,)) for p in range(len(graph.ports))]
        with_matmuls = self.fusing.with_matmuls
        self.before = self._find_before() if with_matmuls else {}
        self.long_rows = self._find_long_rows() if with_matmuls else set()
        self.reading = PortReads.of(
            self.readers, graph.columns, self.depth, self.before, with_matmuls
        )

    def decide(self, port: Port) -> None:
        """Decide for a port; those that are made before have been decided."""
        node, here = self.graph.nodes[port.node], port.id
        feeds = self.feeds[port.node]
        if self.unsettled:
            self._settle_matmuls(feeds)
        if self._is_expensive(node) or not self._is_cheap(feeds):
            self.dear.add(here)
        if self._is_sunk(node, feeds):
            keep = False
        elif (matmul := self._matmul_behind(node, feeds)) is not None:
            keep = self._ends_fusion(here, node)
            if not keep:
                self.unsettled[here] = matmul
        else:
            keep = self._is_kept(here, node, feeds)
        if not keep and here in self.graph.crossing:
            self.unsettled.pop(here, None)
            self.handed.add(here)
            keep = True
        self.materialised[here] = keep
        if not keep:
            self.sources[here] = self._sources_of(feeds)

    def _sources_of(self, feeds: list[int]) -> frozenset[int]:
        return _NONE.union(*[self.sources[p] for p in feeds])

    def _is_cheap(self, feeds: list[int]) -> bool:
        """Whether nothing dear is computed again to make these."""
        return self.dear.isdisjoint(feeds) or all(
            self.materialised[p] for p in self.dear.intersection(feeds)
        )

    def _is_expensive(self, node: Node) -> bool:
        op = node.op
        if op is None or not op.traits.is_expensive or node.id in self.long_rows:
            return False
        dtype = self.graph.program.values[op.results[0]].dtype
        return self.fusing.recomputes.isdisjoint((op.name, f"{op.name}.{dtype}"))

    def _find_long_rows(self) -> set[int]:
        """From every exponential that a sum over its rows reads, through fusible nodes
        whose rows are as long, both ways, to the matmuls before."""
        nodes = self.graph.nodes
        todo = [n.id for n in nodes if self._is_long_softmax(n)]
        found = set(todo)
        while todo:
            node = nodes[todo.pop()]
            if node.hosts_fusion:
                continue
            before = [nodes[self.graph.ports[p].node] for p in self.feeds[node.id]]
            behind = [nodes[n] for n in self._readers_of(node)]
            for other in [*before, *(n for n in behind if not n.hosts_fusion)]:
                is_of_it = other.is_fusible or other.hosts_fusion
                is_new = is_of_it and other.id not in found
                if is_new and self._row(other) > OBSERVED.longest_row:
                    found.add(other.id)
                    todo.append(other.id)
        return found

    def _is_long_softmax(self, node: Node) -> bool:
        if _kind(node) is not OpKind.EXPONENTIAL:
            return False
        if self._row(node) <= OBSERVED.longest_row:
            return False
        return any(sums(self.graph.nodes[n]) for n in self._readers_of(node))

    def _row(self, node: Node) -> int:
        """Size of the last dim of an op's result; 0 of a scalar."""
        assert node.op is not None
        shape = self.graph.program.values[node.op.results[0]].shape
        return shape[-1] if shape else 0

    def _is_kept(self, port: int, node: Node, feeds: list[int]) -> bool:
        if not node.is_fusible or self.reading.is_needed[port]:
            return True
        if self.reading.count[port] < 2 or node.id in self.long_rows:
            return False
        read = sum(map(self._size_of, self._sources_of(feeds)))
        reads_more = read > OBSERVED.recompute_share * self._size_of(port)
        is_dear = reads_more or self._is_expensive(node)
        is_far = self.reading.deepest[port] > self.depth.at[node.id]
        return (is_dear and (is_far or self.reading.is_parted[port])) or (
            self.reading.num_matmuls[port] > 1 and (reads_more or port in self.dear)
        )

    def _matmul_behind(self, node: Node, feeds: list[int]) -> int | None:
        """The matmul whose fusion goes on with this node."""
        if not self.fusing.with_matmuls:
            return None
        if node.hosts_fusion:
            return node.id
        if not self.unsettled or not node.is_fusible:
            return None
        found = [self.unsettled[p] for p in feeds if p in self.unsettled]
        if not found:
            return None
        self.after[node.id] = found[-1]
        return found[-1]

    def _ends_fusion(self, port: int, node: Node) -> bool:
        """Whether what a matmul's fusion makes is stored here."""
        reading = self.reading
        if reading.ends_fusion[port] or reading.feeds_matmul[port]:
            return True
        if not reading.count[port]:
            return True
        if node.hosts_fusion and node.id in self.long_rows:
            return True
        return not _converts(node) and len(self._parting(port)) > 1

    def _parting(self, port: int) -> list[int]:
        """The readers of a port, with those of a conversion in place of it."""
        found: list[int] = []
        for reader in self.readers.of_port(port):
            node = self.graph.nodes[reader]
            found += self._parting(node.ports[0].id) if _converts(node) else [reader]
        return found

    def _settle_matmuls(self, feeds: list[int]) -> None:
        """Store all but the last of the matmuls' values that one op reads: a fusion
        holds one of them."""
        unsettled = [p for p in feeds if p in self.unsettled]
        for port in unsettled[:-1]:
            self.materialised[port] = True
            self.sources[port] = frozenset((port,))
            self.unsettled.pop(port, None)

    def _is_sunk(self, node: Node, feeds: list[int]) -> bool:
        """Whether a loop makes the value anew in each run: a broadcast of what is
        small, or the loop's own name for one."""
        if node.kind is NodeKind.CONST:
            return not any(self.materialised[p] for p in feeds)
        if _kind(node) is not OpKind.BROADCAST:
            return False
        readers = [self.graph.nodes[n] for n in self._readers_of(node)]
        return any(n.kind is NodeKind.CONST for n in readers) and all(
            n.kind is NodeKind.CONST or n.is_fusible for n in readers
        )

    def _readers_of(self, node: Node) -> list[int]:
        """What reads the first result."""
        return self.readers.of_port(node.ports[0].id)

    def _find_before(self) -> dict[int, int]:
        """For every fusible node that only one matmul reads, through whatever
        number of fusible nodes: that matmul."""
        found: dict[int, int] = {}
        hosts_fusion = self.graph.columns.hosts_fusion.tolist()
        for node in reversed(self.graph.run_order):
            if not node.is_fusible or node.ports[0].id in self.graph.crossing:
                continue
            readers = self._readers_of(node)
            homes = {n if hosts_fusion[n] else found.get(n) for n in readers}
            home = homes.pop() if len(homes) == 1 else None
            if home is not None:
                found[node.id] = home
        return found

    def _size_of(self, port: int) -> int:
        node = self.graph.nodes[self.graph.ports[port].node]
        value = node.value
        if node.kind is NodeKind.OP:
            assert node.op is not None
            value = node.op.results[self.graph.ports[port].result]
        return math.prod(self.graph.program.values[value].shape)


def _kind(node: Node) -> OpKind | None:
    return None if node.op is None else node.op.traits.kind


def _converts(node: Node) -> bool:
    return _kind(node) is OpKind.CONVERSION


def sums(node: Node) -> bool:
    """Whether a node is a sum over dims."""
    if node.op is None or node.op.rule is None:
        return False
    is_sum = any(f.reducer == "sum" for f in node.op.rule.factors)
    return is_sum and node.op.traits.kind is OpKind.REDUCTION
