"""Which values touch memory, as the fusion passes of the compilers have it.

A fusible op's result goes through registers where one fusion can hold it and its
readers; it touches memory where an op that cannot fuse reads it, or where it leaves
a loop or the program. Read by several ops of another level (see `levels`), it is
computed again by each reader's fusion where that is cheap and reads no more than it
would have stored (a convert, a mask, a normalisation); else it is kept.

Some compilers fuse elementwise ops into matmuls (`Device.fuses_matmuls`). Operands are
then computed on the fly; what several matmuls read is kept unless making it reads no
more than it is, and what is dear and read by a matmul's fusion and by others is kept
too. What is computed from a matmul's result is stored in its place, up to the value at
which readers part; a conversion is left to each of them.

Such a fusion holds whole rows of a softmax. Where they are too long for that, the
matmul's own result is stored, and everything behind it, up to the next matmul, is
computed again by each reader, dear or not.

A constant's broadcast that a loop reads is made inside of it
(xla/service/while_loop_constant_sinking.cc).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rhino_jax.hardware.target import Device
from rhino_jax.search.graph import (
    FUSES_OPERANDS,
    MATMULS,
    Edge,
    Graph,
    Node,
    NodeKind,
    Port,
)
from rhino_jax.search.levels import Levels


EXPENSIVE = frozenset(
    {
        "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "erfc",
        "erf_inv", "lgamma", "digamma", "pow", "sin", "cos", "tan", "atan2", "sinh",
        "cosh", "asin", "acos", "atan", "cbrt", "random_bits", "threefry2x32",
    }
)  # fmt: skip
"""Elementwise ops that are not computed twice to save memory, after XLA's
`InstructionFusion::IsExpensive`, but for those that a target says it recomputes."""

LONGEST_ROW = 8192
"""Rows that a matmul's fusion holds: of attention in float32, XLA:TPU stores rows of
8,192 exponentials; of 12,288 and 16,384, and of 8,192 where there is one head, only the
matmul's result (v5e:2x2, v6e:2x2, libtpu 0.0.51)."""

RECOMPUTE_SHARE = 1.1
"""A value is computed again only from at most this many times its own elements."""


@dataclass(frozen=True, slots=True)
class Fusing:
    """How a compiler fuses.

    Attributes:
      with_matmuls: whether a matmul's fusion computes its elementwise operands, and
        what is elementwise in its result.
      expensive: elementwise ops that are not computed twice.
      hoists_conversions: see `hoisting`.
    """

    with_matmuls: bool = False
    expensive: frozenset[str] = EXPENSIVE
    hoists_conversions: bool = False

    @classmethod
    def of(cls, device: Device) -> Fusing:
        return cls(
            device.fuses_matmuls,
            EXPENSIVE - set(device.recomputes),
            device.hoists_conversions,
        )

    @property
    def into(self) -> frozenset[str]:
        """Ops that compute elementwise operands on the fly."""
        return FUSES_OPERANDS | (MATMULS if self.with_matmuls else frozenset())


@dataclass(frozen=True, slots=True)
class Stored:
    """Attributes:
    ports: port → whether its value touches memory.
    matmul_of: elementwise node → the matmul whose fusion it runs in.
    """

    ports: dict[Port, bool]
    matmul_of: dict[int, int]


def find_stored(
    graph: Graph,
    ports: Iterable[Port],
    levels: Levels,
    fusing: Fusing,
) -> Stored:
    """Decide what is stored, before any sharding is chosen.

    Args:
      graph: the program.
      ports: of which values it is asked.
      levels: of its nodes.
      fusing: how the compiler fuses.
    """
    finder = _Finder(graph, levels, fusing)
    for port in sorted(ports, key=lambda p: (graph.nodes[p.node].time, p)):
        finder.decide(port)
    return Stored(finder.stored, finder.before | finder.after)


@dataclass(slots=True)
class _Finder:
    """Attributes:
    graph, levels, fusing: as of `find_stored`.
    readers: port → the edges that read it, with what reads a shared copy in place of
        the copy.
    before: node → the only matmul that reads it, if only through fusible nodes.
    after: node → the matmul whose result it computes on, before that is stored.
    stored: what was decided.
    sources: port → the stored values that making it reads.
    dear: ports that are made from their sources by an expensive op, among others.
    unsettled: ports whose value a matmul's fusion makes and has not stored yet.
    long_rows: nodes of softmaxes whose rows no fusion holds, and the matmuls before.
    """

    graph: Graph
    levels: Levels
    fusing: Fusing
    readers: dict[Port, Sequence[Edge]] = field(init=False)
    before: dict[int, int] = field(init=False)
    after: dict[int, int] = field(default_factory=dict)
    stored: dict[Port, bool] = field(default_factory=dict)
    sources: dict[Port, frozenset[Port]] = field(default_factory=dict)
    dear: set[Port] = field(default_factory=set)
    unsettled: dict[Port, int] = field(default_factory=dict)
    long_rows: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.readers = dict(self.graph.readers)
        for node in self.graph.nodes:
            if node.kind is NodeKind.COPY:
                (edge,) = self.graph.incoming[node.id]
                self.readers[edge.source] = self._readers_behind(edge.source)
        self.before = self._find_before() if self.fusing.with_matmuls else {}
        self.long_rows = self._find_long_rows() if self.fusing.with_matmuls else set()

    def decide(self, port: Port) -> None:
        """Decide for a port; those that are made before have been decided."""
        node = self.graph.nodes[port.node]
        edges = self.readers.get(port, ())
        feeds = [e.source for e in self.graph.incoming[node.id]]
        self._settle_matmuls(feeds)
        if self._is_dear(node, feeds):
            self.dear.add(port)
        if self._is_sunk(node, feeds):
            keep = False
        elif (matmul := self._matmul_behind(node, feeds)) is not None:
            keep = self._ends_fusion(node, edges)
            if not keep:
                self.unsettled[port] = matmul
        else:
            keep = self._is_kept(port, node, edges, feeds)
        self.stored[port] = keep
        self.sources[port] = frozenset({port}) if keep else self._sources_of(feeds)

    def _sources_of(self, feeds: list[Port]) -> frozenset[Port]:
        return frozenset[Port]().union(*(self.sources.get(p, {p}) for p in feeds))

    def _is_dear(self, node: Node, feeds: list[Port]) -> bool:
        if self._is_expensive(node):
            return True
        return any(p in self.dear and not self.stored[p] for p in feeds)

    def _is_expensive(self, node: Node) -> bool:
        return (
            node.op is not None
            and node.op.name in self.fusing.expensive
            and node.id not in self.long_rows
        )

    def _find_long_rows(self) -> set[int]:
        """From every exponential that a sum over its rows reads, through fusible nodes
        whose rows are as long, both ways, to the matmuls before."""
        todo = [n.id for n in self.graph.nodes if self._is_long_softmax(n)]
        found = set(todo)
        while todo:
            node = self.graph.nodes[todo.pop()]
            if node.is_matmul:
                continue
            edges = self.graph.incoming[node.id]
            before = [self.graph.nodes[e.source.node] for e in edges]
            readers = self._readers_of(node)
            behind = [self.graph.nodes[e.target] for e in readers]
            for other in [*before, *(n for n in behind if not n.is_matmul)]:
                is_of_it = other.is_fusible or other.is_matmul
                is_new = is_of_it and other.id not in found
                if is_new and self._row(other) > LONGEST_ROW:
                    found.add(other.id)
                    todo.append(other.id)
        return found

    def _is_long_softmax(self, node: Node) -> bool:
        if node.op is None or node.op.name != "exp" or self._row(node) <= LONGEST_ROW:
            return False
        ops = [self.graph.nodes[e.target].op for e in self._readers_of(node)]
        return any(op is not None and op.name == "reduce_sum" for op in ops)

    def _row(self, node: Node) -> int:
        """Size of the last dim of an op's result; 0 of a scalar."""
        assert node.op is not None
        shape = self.graph.program.values[node.op.results[0]].shape
        return shape[-1] if shape else 0

    def _is_kept(
        self, port: Port, node: Node, edges: Sequence[Edge], feeds: list[Port]
    ) -> bool:
        if not node.is_fusible or self._must_store(edges, self.fusing.into):
            return True
        if len(edges) < 2 or node.id in self.long_rows:
            return False
        assert node.op is not None
        read = sum(map(self._size_of, self._sources_of(feeds)))
        reads_more = read > RECOMPUTE_SHARE * self._size_of(port)
        is_dear = reads_more or self._is_expensive(node)
        levels = self.levels.at
        is_far = max(levels[e.target] for e in edges) > levels[node.id]
        matmuls = sum(self.graph.nodes[e.target].is_matmul for e in edges)
        return (is_dear and (is_far or self._parts(edges))) or (
            matmuls > 1 and (reads_more or port in self.dear)
        )

    def _parts(self, edges: Sequence[Edge]) -> bool:
        """Whether some readers run in a matmul's fusion, and others do not."""
        return len({e.target in self.before for e in edges}) > 1

    def _matmul_behind(self, node: Node, feeds: list[Port]) -> int | None:
        """The matmul whose fusion goes on with this node."""
        if not self.fusing.with_matmuls:
            return None
        if node.is_matmul:
            return node.id
        found = [self.unsettled[p] for p in feeds if p in self.unsettled]
        if not found or not node.is_fusible:
            return None
        self.after[node.id] = found[-1]
        return found[-1]

    def _ends_fusion(self, node: Node, edges: Sequence[Edge]) -> bool:
        """Whether what a matmul's fusion makes is stored here."""
        if not edges or self._must_store(edges, FUSES_OPERANDS):
            return True
        if any(e.target in self.before for e in edges):
            return True
        if node.is_matmul and node.id in self.long_rows:
            return True
        is_conversion = node.op is not None and node.op.name == "convert_element_type"
        return not is_conversion and len(self._parting(edges)) > 1

    def _parting(self, edges: Sequence[Edge]) -> list[Edge]:
        """The edges, with what reads a conversion in place of the conversion."""
        found: list[Edge] = []
        for edge in edges:
            target = self.graph.nodes[edge.target]
            if target.op is not None and target.op.name == "convert_element_type":
                found += self._parting(self._readers_of(target))
            else:
                found.append(edge)
        return found

    def _settle_matmuls(self, feeds: list[Port]) -> None:
        """Store all but the last of the matmuls' values that one op reads: a fusion
        holds one of them."""
        unsettled = [p for p in feeds if p in self.unsettled]
        for port in unsettled[:-1]:
            self.stored[port] = True
            self.sources[port] = frozenset({port})
            del self.unsettled[port]

    def _is_sunk(self, node: Node, feeds: list[Port]) -> bool:
        """Whether a loop makes the value anew in each run: a broadcast of what is
        small, or the loop's own name for one."""
        if node.kind is NodeKind.CONST:
            return all(not self.stored.get(p, True) for p in feeds)
        if node.op is None or node.op.name != "broadcast_in_dim":
            return False
        readers = [self.graph.nodes[e.target] for e in self._readers_of(node)]
        return any(n.kind is NodeKind.CONST for n in readers) and all(
            n.kind is NodeKind.CONST or n.is_fusible for n in readers
        )

    def _must_store(self, edges: Sequence[Edge], into: frozenset[str]) -> bool:
        """Whether some reader needs the value in memory."""
        for edge in edges:
            target = self.graph.nodes[edge.target]
            if target.kind is not NodeKind.OP:
                return True
            assert target.op is not None
            if not target.op.is_fusible and target.op.name not in into:
                return True
        return False

    def _readers_of(self, node: Node) -> Sequence[Edge]:
        return self.readers.get(Port(node.id, 0), ())

    def _readers_behind(self, port: Port) -> list[Edge]:
        found: list[Edge] = []
        for edge in self.graph.readers[port]:
            is_copy = self.graph.nodes[edge.target].kind is NodeKind.COPY
            found += self.graph.outgoing[edge.target] if is_copy else [edge]
        return found

    def _find_before(self) -> dict[int, int]:
        """For every fusible node that only one matmul reads, through whatever
        number of fusible nodes: that matmul."""
        found: dict[int, int] = {}
        for node in reversed(self.graph.run_order):
            if not node.is_fusible:
                continue
            homes: set[int | None] = set()
            for edge in self._readers_of(node):
                target = edge.target
                is_matmul = self.graph.nodes[target].is_matmul
                homes.add(target if is_matmul else found.get(target))
            home = homes.pop() if len(homes) == 1 else None
            if home is not None:
                found[node.id] = home
        return found

    def _size_of(self, port: Port) -> int:
        node = self.graph.nodes[port.node]
        value = node.value
        if node.kind is NodeKind.OP:
            assert node.op is not None
            value = node.op.results[port.result]
        return math.prod(self.graph.program.values[value].shape)
