"""The program as one flat graph of choices: nodes that choose specs, edges that
carry values between them.

Regions disappear here. Calls are entered in place. A loop's body is entered once,
its nodes count `trip_count` times, and every value that crosses the loop's border
gets a node of its own: a carry has one spec on the way in, around and out, which
is the tie that a loop demands.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rhino_jax.ir.program import Op, Program


class NodeKind(enum.Enum):
    """What chooses: an op, or a value that crosses a border."""

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
    """A place where a choice is made.

    Attributes:
      id: position in `Graph.nodes`.
      kind: see `NodeKind`.
      count: how often it runs per step.
      time: position in program order.
      op: the op (of a loop node: the loop).
      slot: which input, carry, result of it.
      value: id of the value that the node holds, for names (OP: first result).
      ports: its results.
      is_fusible: an op whose result goes through registers where its neighbours do.
      is_fused: such an op, or one that computes fusible operands on the fly.
      is_matmul: a contraction, which the matrix unit runs.
      hosts_fusion: as of `Traits`.
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


@dataclass(slots=True, eq=False)
class Port:
    """A result of a node.

    Attributes:
      id: position in `Graph.ports`; they follow each other in the order of nodes.
      node, result: which of whose.
    """

    id: int
    node: int
    result: int


class AnnotationSite(NamedTuple):
    """Where a spec must be written down when the plan is applied, but for the operands
    of ops that choose.

    Attributes:
      kind: "operand" (op id, position), "region" (op id, region, position) or
        "output" (position).
      key: see kind.
    """

    kind: str
    key: tuple[int, ...]


@dataclass(slots=True)
class Edge:
    """A value on its way from where it is made to where it is read.

    Attributes:
      source: where it is made.
      target: node that reads it.
      operand: which operand of that node.
      value: value id (whole bytes, names).
      count: how often it is carried per step.
      time: when it is read.
      site: what else than an op's operand it is in the program, if anything.
      part: which of the computations that are compiled on their own reads it, where an
        op does: branches are, and recomputed regions.
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
    """A graph in arrays, for what is asked of all of it at once.

    Attributes:
      is_op, is_copy: [nodes], whether they are of that kind.
      is_fusible, is_fused, hosts_fusion, time: [nodes], as of `Node`.
      place: [nodes], in the run order.
      maker, result: [ports], which result of which node.
      source, target, operand, value, count, read: [edges], the port that it comes from,
        the node that reads it, as which operand, what, how often, and when.
    """

    is_op: np.ndarray
    is_copy: np.ndarray
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
        is_copy = np.array([n.kind is NodeKind.COPY for n in nodes], dtype=bool)
        time = np.array([n.time for n in nodes], dtype=np.int64)
        place = np.empty(len(nodes), dtype=np.int64)
        # A shared copy is read at the time at which it is made.
        place[np.lexsort((~is_copy, time))] = np.arange(len(nodes))
        return cls(
            np.array([n.kind is NodeKind.OP for n in nodes], dtype=bool),
            is_copy,
            np.array([n.is_fusible for n in nodes], dtype=bool),
            np.array([n.is_fused for n in nodes], dtype=bool),
            np.array([n.hosts_fusion for n in nodes], dtype=bool),
            time,
            place,
            np.array([p.node for p in ports], dtype=np.int64),
            np.array([p.result for p in ports], dtype=np.int64),
            np.array([e.source.id for e in edges], dtype=np.int64),
            np.array([e.target for e in edges], dtype=np.int64),
            np.array([e.operand for e in edges], dtype=np.int64),
            np.array([e.value for e in edges], dtype=np.int64),
            np.array([e.count for e in edges], dtype=np.int64),
            np.array([e.time for e in edges], dtype=np.int64),
        )


@dataclass(slots=True)
class Graph:
    """All nodes and edges.

    Attributes:
      program: the program.
      nodes, edges: the graph.
      ports: the results of all nodes, whether or not anything reads them.
      held: value id → port that holds it (absent: scalars, literals).
      loop_start, loop_end: node id of a loop's border node → time when the loop
        starts and ends.
      fronts: copies through which fusible ops read, too (see `shared_copies`).
      crossing: ports whose values enter or leave what is compiled on its own.
      alone: node → which part that is compiled on its own it is in, from 1 on.
      end: time after the last op.
      output_ports: for every program output, the port that holds it, or None.
      run_order: all nodes, what is made before what reads it.
      readers: of every port, the edges that read it.
      incoming, outgoing: of every node, the edges that it reads, and that read it.
      columns: all of it in arrays.

    The last five are there when `finish` was called.
    """

    program: Program
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
    run_order: tuple[Node, ...] = ()
    readers: list[Sequence[Edge]] = field(default_factory=list)
    incoming: list[list[Edge]] = field(default_factory=list)
    outgoing: list[list[Edge]] = field(default_factory=list)
    columns: Columns = field(init=False)

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
        # A carry has two: what the body reads, and what the loop leaves.
        num_ports = 2 if kind is NodeKind.CARRY else 1
        if kind is NodeKind.OP and op is not None:
            num_ports = len(op.results)
            is_fusible = op.is_fusible
            is_fused = is_fusible or op.traits.fuses_operands
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
        """Let `target` read `value`, if the value is planned at all."""
        port = self.held.get(value)
        if port is not None:
            edge = Edge(port, target, operand, value, count, time, site, part)
            self.edges.append(edge)

    def finish(self) -> None:
        """Say in which order all runs, and who reads what."""
        self.columns = Columns.of(self.nodes, self.ports, self.edges)
        order = np.argsort(self.columns.place).tolist()
        self.run_order = tuple([self.nodes[n] for n in order])
        self.incoming = [[] for _ in self.nodes]
        self.outgoing = [[] for _ in self.nodes]
        for edge in self.edges:
            self.incoming[edge.target].append(edge)
            self.outgoing[edge.source.node].append(edge)
        self.readers = list(self.outgoing)
        if len(self.ports) > len(self.nodes):
            self.readers = [self._readers(port) for port in self.ports]

    def _readers(self, port: Port) -> Sequence[Edge]:
        edges = self.outgoing[port.node]
        if len(self.nodes[port.node].ports) == 1:
            return edges
        return [e for e in edges if e.source is port]
