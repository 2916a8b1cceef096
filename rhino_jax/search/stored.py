"""Which values touch memory, as the fusion passes of the compilers have it.

A fusible op's result goes through registers where one fusion can hold it and its
readers; it touches memory where an op that cannot fuse reads it, or where it leaves
a loop or the program. Read by several ops of another level (see `kernels`), it is
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
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from rhino_jax.hardware.target import Device
from rhino_jax.search.graph import Edge, Graph, Node, NodeKind, Port


FUSES_OPERANDS = frozenset(
    {
        "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and",
        "reduce_or", "argmax", "argmin", "dynamic_update_slice", "scatter-add",
        "scatter_add", "scatter", "concatenate", "pad",
    }
)  # fmt: skip
"""Ops that compute elementwise operands on the fly, as XLA's fusion does for
reductions, updates and copies (xla/service/instruction_fusion.cc)."""

EXPENSIVE = frozenset(
    {
        "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "erfc",
        "erf_inv", "lgamma", "digamma", "pow", "sin", "cos", "tan", "atan2", "sinh",
        "cosh", "asin", "acos", "atan", "cbrt", "random_bits", "threefry2x32",
    }
)  # fmt: skip
"""Elementwise ops that are not computed twice to save memory, after XLA's
`InstructionFusion::IsExpensive`, but for those that a target says it recomputes."""

MATMULS = frozenset({"dot_general", "conv_general_dilated"})

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


def is_fusible(node: Node) -> bool:
    return node.kind is NodeKind.OP and node.op is not None and node.op.is_fusible


def is_matmul(node: Node) -> bool:
    return node.op is not None and node.kind is NodeKind.OP and node.op.name in MATMULS


def find_stored(
    graph: Graph,
    ports: Iterable[Port],
    readers: dict[Port, list[Edge]],
    levels: list[int],
    fusing: Fusing,
) -> Stored:
    """Decide what is stored, before any sharding is chosen.

    Args:
      graph: the program.
      ports: of which values it is asked.
      readers: port → the edges that read it.
      levels: of the nodes, see `kernels`.
      fusing: how the compiler fuses.
    """
    finder = _Finder(graph, readers, levels, fusing)
    for port in sorted(ports, key=lambda p: (graph.nodes[p.node].time, p)):
        finder.decide(port)
    return Stored(finder.stored, finder.before | finder.after)


@dataclass(slots=True)
class _Finder:
    """Attributes:
    graph, readers, levels, fusing: as of `find_stored`.
    feeds: node → the ports that it reads.
    before: node → the only matmul that reads it, if only through fusible nodes.
    after: node → the matmul whose result it computes on, before that is stored.
    stored: what was decided.
    sources: port → the stored values that making it reads.
    dear: ports that are made from their sources by an expensive op, among others.
    unsettled: ports whose value a matmul's fusion makes and has not stored yet.
    long_rows: nodes of softmaxes whose rows no fusion holds, and the matmuls before.
    """

    graph: Graph
    readers: dict[Port, list[Edge]]
    levels: list[int]
    fusing: Fusing
    feeds: dict[int, list[Port]] = field(init=False)
    before: dict[int, int] = field(init=False)
    after: dict[int, int] = field(default_factory=dict)
    stored: dict[Port, bool] = field(default_factory=dict)
    sources: dict[Port, frozenset[Port]] = field(default_factory=dict)
    dear: set[Port] = field(default_factory=set)
    unsettled: dict[Port, int] = field(default_factory=dict)
    long_rows: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.feeds = defaultdict(list)
        for edge in self.graph.edges:
            self.feeds[edge.target].append(edge.source)
        self.before = self._find_before() if self.fusing.with_matmuls else {}
        self.long_rows = self._find_long_rows() if self.fusing.with_matmuls else set()

    def decide(self, port: Port) -> None:
        """Decide for a port; those that are made before have been decided."""
        node = self.graph.nodes[port.node]
        edges = self._readers_behind(self.readers[port])
        self._settle_matmuls(node)
        feeds = self.feeds[node.id]
        if self._is_dear(node, feeds):
            self.dear.add(port)
        reads = frozenset[Port]().union(*(self.sources.get(p, {p}) for p in feeds))
        if self._is_sunk(node, feeds):
            keep = False
        elif (matmul := self._matmul_behind(node, feeds)) is not None:
            keep = self._ends_fusion(node, edges)
            if not keep:
                self.unsettled[port] = matmul
        else:
            keep = self._is_kept(port, node, edges, reads)
        self.stored[port] = keep
        self.sources[port] = frozenset({port}) if keep else reads

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
            if is_matmul(node):
                continue
            before = [self.graph.nodes[p.node] for p in self.feeds[node.id]]
            readers = self._readers_behind(self.readers[Port(node.id, 0)])
            behind = [self.graph.nodes[e.target] for e in readers]
            for other in [*before, *(n for n in behind if not is_matmul(n))]:
                is_of_it = is_fusible(other) or is_matmul(other)
                is_new = is_of_it and other.id not in found
                if is_new and self._row(other) > LONGEST_ROW:
                    found.add(other.id)
                    todo.append(other.id)
        return found

    def _is_long_softmax(self, node: Node) -> bool:
        if node.op is None or node.op.name != "exp" or self._row(node) <= LONGEST_ROW:
            return False
        readers = self._readers_behind(self.readers[Port(node.id, 0)])
        ops = [self.graph.nodes[e.target].op for e in readers]
        return any(op is not None and op.name == "reduce_sum" for op in ops)

    def _row(self, node: Node) -> int:
        """Size of the last dim of an op's result; 0 of a scalar."""
        assert node.op is not None
        shape = self.graph.program.values[node.op.results[0]].shape
        return shape[-1] if shape else 0

    def _is_kept(
        self, port: Port, node: Node, edges: list[Edge], reads: frozenset[Port]
    ) -> bool:
        if not is_fusible(node) or self._must_store(edges, self.fusing.into):
            return True
        if len(edges) < 2 or node.id in self.long_rows:
            return False
        assert node.op is not None
        read = sum(self._size_of(p) for p in reads)
        reads_more = read > RECOMPUTE_SHARE * self._size_of(port)
        is_dear = reads_more or self._is_expensive(node)
        is_far = max(self.levels[e.target] for e in edges) > self.levels[node.id]
        matmuls = sum(is_matmul(self.graph.nodes[e.target]) for e in edges)
        return (is_dear and (is_far or self._parts(edges))) or (
            matmuls > 1 and (reads_more or port in self.dear)
        )

    def _parts(self, edges: list[Edge]) -> bool:
        """Whether some readers run in a matmul's fusion, and others do not."""
        return len({e.target in self.before for e in edges}) > 1

    def _matmul_behind(self, node: Node, feeds: list[Port]) -> int | None:
        """The matmul whose fusion goes on with this node."""
        if not self.fusing.with_matmuls:
            return None
        if is_matmul(node):
            return node.id
        found = [self.unsettled[p] for p in feeds if p in self.unsettled]
        if not found or not is_fusible(node):
            return None
        self.after[node.id] = found[-1]
        return found[-1]

    def _ends_fusion(self, node: Node, edges: list[Edge]) -> bool:
        """Whether what a matmul's fusion makes is stored here."""
        if not edges or self._must_store(edges, FUSES_OPERANDS):
            return True
        if any(e.target in self.before for e in edges):
            return True
        if is_matmul(node) and node.id in self.long_rows:
            return True
        is_conversion = node.op is not None and node.op.name == "convert_element_type"
        return not is_conversion and len(self._parting(edges)) > 1

    def _parting(self, edges: list[Edge]) -> list[Edge]:
        """The edges, with what reads a conversion in place of the conversion."""
        found: list[Edge] = []
        for edge in edges:
            target = self.graph.nodes[edge.target]
            if target.op is not None and target.op.name == "convert_element_type":
                behind = self._readers_behind(self.readers[Port(target.id, 0)])
                found += self._parting(behind)
            else:
                found.append(edge)
        return found

    def _settle_matmuls(self, node: Node) -> None:
        """Store all but the last of the matmuls' values that one op reads: a fusion
        holds one of them."""
        unsettled = [p for p in self.feeds[node.id] if p in self.unsettled]
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
        readers = [self.graph.nodes[e.target] for e in self.readers[Port(node.id, 0)]]
        return any(n.kind is NodeKind.CONST for n in readers) and all(
            n.kind is NodeKind.CONST or is_fusible(n) for n in readers
        )

    def _must_store(self, edges: list[Edge], into: frozenset[str]) -> bool:
        """Whether some reader needs the value in memory."""
        for edge in edges:
            target = self.graph.nodes[edge.target]
            if target.kind is not NodeKind.OP:
                return True
            assert target.op is not None
            if not target.op.is_fusible and target.op.name not in into:
                return True
        return False

    def _readers_behind(self, edges: list[Edge]) -> list[Edge]:
        """The edges, with what reads a shared copy in place of the copy."""
        found: list[Edge] = []
        for edge in edges:
            is_copy = self.graph.nodes[edge.target].kind is NodeKind.COPY
            found += self.readers[Port(edge.target, 0)] if is_copy else [edge]
        return found

    def _find_before(self) -> dict[int, int]:
        """For every fusible node that only one matmul reads, through whatever
        number of fusible nodes: that matmul."""
        found: dict[int, int] = {}
        for node in reversed(self.graph.run_order):
            if not is_fusible(node):
                continue
            behind = self._readers_behind(self.readers[Port(node.id, 0)])
            targets = {self._home(e.target, found) for e in behind}
            home = targets.pop() if len(targets) == 1 else None
            if home is not None:
                found[node.id] = home
        return found

    def _home(self, target: int, found: dict[int, int]) -> int | None:
        return target if is_matmul(self.graph.nodes[target]) else found.get(target)

    def _size_of(self, port: Port) -> int:
        node = self.graph.nodes[port.node]
        value = node.value
        if node.kind is NodeKind.OP:
            assert node.op is not None
            value = node.op.results[port.result]
        return math.prod(self.graph.program.values[value].shape)
