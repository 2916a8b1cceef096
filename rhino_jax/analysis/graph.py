"""The program as one flat graph of choices: nodes that choose specs, and edges that
carry values between them.

Regions disappear here. Calls are inlined. A loop's body is entered once, with nodes
that count `trip_count` times, and every value that crosses the loop's border gets a
border node: a carry has a single spec on entry, in the body and on exit, which is the
constraint that a loop imposes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rhino_jax.ir.factor import Rule
from rhino_jax.ir.program import Op, Program, Value
from rhino_jax.ir.traits import OpKind


class NodeKind(enum.Enum):
    """The kind of a node: an op, or a value that crosses a border."""

    INPUT = "input"
    OP = "op"
    CARRY = "carry"
    CONST = "const"
    SLICE = "slice"
    STACK = "stack"
    JOIN = "join"
    COPY = "copy"
    OUTPUT = "output"


@dataclass(slots=True)
class Node:
    """A node of the graph, which chooses one of its options.

    Attributes:
      id: position in `Graph.nodes`.
      kind: see `NodeKind`.
      count: how often it runs per step.
      time: position in program order.
      op: the op; for a border node, the loop or branch; None for inputs, outputs and
        copies.
      slot: which input, carry or result of the program or loop it is.
      value: id of the value that the node holds, for names (OP: first result).
      ports: its results.
      is_fusible: whether it is an op whose result stays in registers where its
        neighbours fuse with it.
      is_fused: whether it is fusible, or an op that fusible producers fuse into.
      is_matmul: whether it is a contraction, which runs on the matrix unit.
      hosts_fusion: as in `Traits`.
      op_kind: the kind of its op, also of a loop or branch; None: it has no op.
      rule: the factors of its op; None for a border node.
    """

    id: int
    kind: NodeKind
    count: int
    time: int
    op: Op | None
    slot: int
    value: int
    ports: tuple[Port, ...]
    is_fusible: bool
    is_fused: bool
    is_matmul: bool
    hosts_fusion: bool

    @property
    def op_kind(self) -> OpKind | None:
        return None if self.op is None else self.op.traits.kind

    @property
    def rule(self) -> Rule | None:
        return None if self.op is None else self.op.rule


@dataclass(slots=True, eq=False)
class Port:
    """A result of a node.

    Attributes:
      id: position in `Graph.ports`, in the order of nodes.
      node: id of the node.
      result: which of its results.
    """

    id: int
    node: int
    result: int


class AnnotationSite(NamedTuple):
    """A place, other than an operand of an op node, where applying a plan annotates a
    spec.

    Attributes:
      kind: "operand" (op id, position), "region" (op id, region, position) or "output"
        (position).
      key: the numbers in parentheses, by kind.
    """

    kind: str
    key: tuple[int, ...]


@dataclass(slots=True)
class Edge:
    """A value on the way from the port that holds it to a node that reads it.

    Attributes:
      source: the port that holds it.
      target: id of the node that reads it.
      operand: which operand of that node it is.
      value: value id, for the bytes of the whole value and for names.
      count: how often it is carried per step.
      time: when it is read, in program order.
      site: where its spec is annotated; None for an operand of an op node.
      part: for a reader that is an op, number of the separately compiled region (a
        branch, or a recomputed region) that it is in; 0 elsewhere.
    """

    source: Port
    target: int
    operand: int
    value: int
    count: int
    time: int
    site: AnnotationSite | None = None
    part: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A graph as arrays, for vectorised queries.

    Attributes:
      is_op, is_copy, is_stack: [nodes], whether they are of that kind.
      is_fusible, is_fused, hosts_fusion, time: [nodes], as in `Node`.
      place: [nodes], position in the run order.
      maker, result: [ports], id of the node of the port, and which of its results it
        is.
      source, target, operand, value, count, read: [edges], id of the source port, of
        the reading node, which operand it is, value id, times per step, and time of the
        read.
    """

    is_op: np.ndarray
    is_copy: np.ndarray
    is_stack: np.ndarray
    is_fusible: np.ndarray
    is_fused: np.ndarray
    hosts_fusion: np.ndarray
    time: np.ndarray
    place: np.ndarray
    maker: np.ndarray
    result: np.ndarray
    source: np.ndarray
    target: np.ndarray
    operand: np.ndarray
    value: np.ndarray
    count: np.ndarray
    read: np.ndarray

    @classmethod
    def of(
        cls,
        nodes: Sequence[Node],
        ports: Sequence[Port],
        edges: Sequence[Edge],
    ) -> Columns:
        kinds = NodeKind.OP, NodeKind.COPY, NodeKind.STACK
        is_op, is_copy, is_stack = _columns(
            [[n.kind is kind for kind in kinds] for n in nodes], 3, bool
        )
        is_fusible, is_fused, hosts_fusion = _columns(
            [(n.is_fusible, n.is_fused, n.hosts_fusion) for n in nodes], 3, bool
        )
        maker, result = _columns([(p.node, p.result) for p in ports], 2)
        source, target, operand, value, count, read = _columns(
            [
                (e.source.id, e.target, e.operand, e.value, e.count, e.time)
                for e in edges
            ],
            6,
        )
        time = np.array([n.time for n in nodes], dtype=np.int64)
        place = np.empty(len(nodes), dtype=np.int64)
        # A shared copy has the time of its first reader, and runs before it.
        place[np.lexsort((~is_copy, time))] = np.arange(len(nodes))
        return cls(
            is_op,
            is_copy,
            is_stack,
            is_fusible,
            is_fused,
            hosts_fusion,
            time,
            place,
            maker,
            result,
            source,
            target,
            operand,
            value,
            count,
            read,
        )


def _columns(
    rows: Sequence[Sequence[int]], width: int, dtype: type = np.int64
) -> np.ndarray:
    """Return [width, rows], the columns of a table, each one contiguous."""
    return np.array(rows, dtype).reshape(-1, width).T.copy()


def reached(starts: Iterable[int], near: Callable[[int], Iterable[int]]) -> set[int]:
    """Return the ids of some nodes, and of all that `near` leads to from them.

    Args:
      starts: ids of the nodes to start from.
      near: returns the ids of the nodes that are one step from a node.
    """
    found = {*starts}
    todo = list(found)
    while todo:
        new = {*near(todo.pop())} - found
        found |= new
        todo += new
    return found


@dataclass(slots=True)
class Graph:
    """All nodes and edges of a program.

    Attributes:
      program: the program.
      fuses_rotations, fuses_scatters: as in `Device.inlining`.
      nodes, edges: the graph.
      ports: the results of all nodes, whether or not anything reads them.
      held: value id → port that holds it (absent: scalars, literals).
      loop_start, loop_end: node id of a loop's border node → time when the loop starts
        and ends.
      fronts: ids of copies through which fusible ops read, too (see `shared_copies`).
      crossing: ids of ports whose values enter or leave a separately compiled program.
      alone: node id → number, from 1 on, of the separately compiled program that it is
        in.
      end: time after the last op.
      loops: times when loops start and end, outer before inner ones.
      output_ports: [outputs], the port that holds each, or None.
      scalars: what the scalars wait for that ops compute of several other ones: their
        time, and sources as in `scalar_reads`.
      scalar_reads: (node id, source) of the scalars that nodes read, or that decide
        whether they run; a source is the id of the node that computes a scalar, or
        `~position` in `scalars`.
      run_order: all nodes, producers before their readers.
      steps: ids of nodes and, from `len(nodes)` on, of `scalars`, in run order.
      scalar_sources, scalar_readers: [steps], the steps whose scalars each waits for,
        and those that wait for its scalar.
      readers: [ports], the edges that read each.
      incoming, outgoing: [nodes], the edges that enter and leave each.
      columns: the graph as arrays.

    All from `run_order` on are set by `finish`.
    """

    program: Program
    fuses_rotations: bool = False
    fuses_scatters: bool = True
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    ports: list[Port] = field(default_factory=list)
    held: dict[int, Port] = field(default_factory=dict)
    loop_start: dict[int, int] = field(default_factory=dict)
    loop_end: dict[int, int] = field(default_factory=dict)
    fronts: set[int] = field(default_factory=set)
    crossing: set[int] = field(default_factory=set)
    alone: dict[int, int] = field(default_factory=dict)
    end: int = 0
    output_ports: list[Port | None] = field(default_factory=list)
    scalars: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    scalar_reads: list[tuple[int, int]] = field(default_factory=list)
    run_order: tuple[Node, ...] = ()
    steps: Sequence[int] = ()
    scalar_sources: list[list[int]] = field(default_factory=list)
    scalar_readers: list[list[int]] = field(default_factory=list)
    readers: list[Sequence[Edge]] = field(default_factory=list)
    incoming: list[list[Edge]] = field(default_factory=list)
    outgoing: list[list[Edge]] = field(default_factory=list)
    loops: list[tuple[int, int]] = field(default_factory=list)
    columns: Columns = field(init=False)

    def loops_around(self, time: int) -> list[tuple[int, int]]:
        """Return the entries of `loops` that a time is in."""
        return [loop for loop in self.loops if loop[0] < time < loop[1]]

    def value_id(self, port: int) -> int:
        """Return the id of the value that a port holds."""
        node = self.nodes[self.ports[port].node]
        if node.kind is not NodeKind.OP or node.op is None:
            return node.value
        return node.op.results[self.ports[port].result]

    def value(self, port: int) -> Value:
        """Return the value that a port holds."""
        return self.program.values[self.value_id(port)]

    def nodes_before(self, node: int, operand: int | None = None) -> list[Node]:
        """Return the nodes that a node reads, in the order of its edges: of one
        operand, or of all."""
        edges = self.incoming[node]
        read = [e for e in edges if operand is None or e.operand == operand]
        return [self.nodes[e.source.node] for e in read]

    def nodes_behind(self, node: int) -> list[Node]:
        """Return the nodes that read a node, once per edge."""
        return [self.nodes[e.target] for e in self.outgoing[node]]

    def _fuses(self, scatter: Op) -> bool:
        """Whether a scatter computes its updates: all, or those into zeros, where there
        are more of them than rows in the result."""
        table, values = self.held.get(scatter.operands[0]), self.program.values
        if self.fuses_scatters or table is None:
            return self.fuses_scatters
        is_zeros = self.nodes[table.node].op_kind is OpKind.BROADCAST
        made, added = values[scatter.results[0]], values[scatter.operands[-1]]
        return is_zeros and made.size < added.size

    def add(
        self,
        kind: NodeKind,
        count: int,
        time: int,
        op: Op | None,
        slot: int,
        value: int,
    ) -> Node:
        is_fusible = is_fused = is_matmul = hosts_fusion = False
        # A carry has two: the one that the body reads, and the result of the loop.
        num_ports = 2 if kind is NodeKind.CARRY else 1
        if kind is NodeKind.OP and op is not None:
            num_ports = len(op.results)
            is_fusible = op.is_fusible or (
                self.fuses_rotations and op.traits.is_rotation
            )
            is_fused = is_fusible or (
                op.traits.fuses_operands
                and (op.traits.kind is not OpKind.SCATTER or self._fuses(op))
            )
            is_matmul = op.traits.is_contraction
            hosts_fusion = op.traits.hosts_fusion
        here, first = len(self.nodes), len(self.ports)
        ports: tuple[Port, ...] = (Port(first, here, 0),)
        if num_ports > 1:
            ports += tuple([Port(first + i, here, i) for i in range(1, num_ports)])
        self.ports += ports
        node = Node(
            here,
            kind,
            count,
            time,
            op,
            slot,
            value,
            ports,
            is_fusible,
            is_fused,
            is_matmul,
            hosts_fusion,
        )
        self.nodes.append(node)
        return node

    def connect(
        self,
        value: int,
        target: int,
        operand: int,
        count: int,
        time: int,
        site: AnnotationSite | None = None,
        part: int = 0,
    ) -> None:
        """Add an edge from a value to the node `target`, unless the value is not
        planned."""
        port = self.held.get(value)
        if port is not None:
            edge = Edge(port, target, operand, value, count, time, site, part)
            self.edges.append(edge)

    def finish(self) -> None:
        """Compute the run order, the edges of every node and port, and the columns."""
        self.columns = Columns.of(self.nodes, self.ports, self.edges)
        order = np.argsort(self.columns.place).tolist()
        self.run_order = tuple([self.nodes[n] for n in order])
        self._order_scalars(order)
        ends = self.loop_end.items()
        self.loops = sorted({(self.loop_start[n], end) for n, end in ends})
        self.incoming = [[] for _ in self.nodes]
        self.outgoing = [[] for _ in self.nodes]
        for edge in self.edges:
            self.incoming[edge.target].append(edge)
            self.outgoing[edge.source.node].append(edge)
        self.readers = list(self.outgoing)
        if len(self.ports) > len(self.nodes):
            self.readers = [self._readers(port) for port in self.ports]

    def _order_scalars(self, order: list[int]) -> None:
        """Set `steps`, `scalar_sources` and `scalar_readers`."""
        first, last = len(self.nodes), len(self.nodes) + len(self.scalars)
        self.scalar_sources = [[] for _ in range(last)]
        self.scalar_readers = [[] for _ in range(last)]
        reads = [(first + k, x) for k, (_, of) in enumerate(self.scalars) for x in of]
        for step, source in (*self.scalar_reads, *reads):
            source = source if source >= 0 else first + ~source
            self.scalar_sources[step].append(source)
            self.scalar_readers[source].append(step)
        times = [node.time for node in self.nodes] + [time for time, _ in self.scalars]
        # Sorting is stable: copies run before their readers, which have the same time.
        steps = [*order, *range(first, last)]
        self.steps = sorted(steps, key=times.__getitem__) if self.scalars else order

    def _readers(self, port: Port) -> Sequence[Edge]:
        edges = self.outgoing[port.node]
        if len(self.nodes[port.node].ports) == 1:
            return edges
        return [e for e in edges if e.source is port]
