"""The program as one flat graph of choices: nodes that choose specs, edges that
carry values between them.

Regions disappear here. Calls are entered in place. A loop's body is entered once,
its nodes count `trip_count` times, and every value that crosses the loop's border
gets a node of its own: a carry has one spec on the way in, around and out, which
is the tie that a loop demands.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from rhino_jax.ir.program import Op, Program, Value


FUSES_OPERANDS = frozenset(
    {
        "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and",
        "reduce_or", "argmax", "argmin", "dynamic_update_slice", "scatter-add",
        "scatter_add", "scatter", "concatenate", "pad",
    }
)  # fmt: skip
"""Ops that compute elementwise operands on the fly, as XLA's fusion does for
reductions, updates and copies (xla/service/instruction_fusion.cc)."""

MATMULS = frozenset({"dot_general", "conv_general_dilated"})


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
      is_fusible: an op whose result goes through registers where its neighbours do.
      is_fused: such an op, or one that computes fusible operands on the fly.
      is_matmul: an op of the matrix unit.
    """

    id: int
    kind: NodeKind
    count: int
    time: int
    op: Op | None
    slot: int
    value: int
    is_fusible: bool
    is_fused: bool
    is_matmul: bool


class Port(NamedTuple):
    """A result of a node."""

    node: int
    result: int


class Use(NamedTuple):
    """Where a spec must be written down when the plan is applied.

    Attributes:
      kind: "operand" (op id, position), "region" (op id, region, position),
        "output" (position) or "" where nothing is read by the program itself.
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
      uses: what it stands for in the program.
    """

    source: Port
    target: int
    operand: int
    value: int
    count: int
    time: int
    uses: tuple[Use, ...] = ()


@dataclass(slots=True)
class Graph:
    """All nodes and edges.

    Attributes:
      program: the program.
      nodes, edges: the graph.
      held: value id → port that holds it (absent: scalars, literals).
      loop_start, loop_end: node id of a loop's border node → time when the loop
        starts and ends.
      end: time after the last op.
      output_ports: for every program output, the port that holds it, or None.
      run_order: all nodes, what is made before what reads it.
      readers: port → the edges that read it, where there are any.
      incoming, outgoing: of every node, the edges that it reads, and that read it.

    The last four are there when `finish` was called.
    """

    program: Program
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    held: dict[int, Port] = field(default_factory=dict)
    loop_start: dict[int, int] = field(default_factory=dict)
    loop_end: dict[int, int] = field(default_factory=dict)
    end: int = 0
    output_ports: list[Port | None] = field(default_factory=list)
    run_order: tuple[Node, ...] = ()
    readers: dict[Port, list[Edge]] = field(default_factory=dict)
    incoming: list[list[Edge]] = field(default_factory=list)
    outgoing: list[list[Edge]] = field(default_factory=list)

    def add(
        self,
        kind: NodeKind,
        count: int,
        time: int,
        op: Op | None,
        slot: int,
        value: int,
    ) -> Node:
        is_fusible = is_fused = is_matmul = False
        if kind is NodeKind.OP and op is not None:
            is_fusible = op.is_fusible
            is_fused = is_fusible or op.name in FUSES_OPERANDS
            is_matmul = op.name in MATMULS
        node = Node(
            len(self.nodes),
            kind,
            count,
            time,
            op,
            slot,
            value,
            is_fusible,
            is_fused,
            is_matmul,
        )
        self.nodes.append(node)
        return node

    def connect(
        self,
        value: Value,
        target: int,
        operand: int,
        count: int,
        time: int,
        *uses: Use,
    ) -> None:
        """Let `target` read `value`, if the value is planned at all."""
        port = self.held.get(value.id)
        if port is not None:
            self.edges.append(
                Edge(port, target, operand, value.id, count, time, tuple(uses))
            )

    def finish(self) -> None:
        """Say in which order all runs, and who reads what."""
        self.run_order = tuple(sorted(self.nodes, key=_in_run_order))
        self.incoming = [[] for _ in self.nodes]
        self.outgoing = [[] for _ in self.nodes]
        self.readers = {}
        for edge in self.edges:
            self.incoming[edge.target].append(edge)
            self.outgoing[edge.source.node].append(edge)
            self.readers.setdefault(edge.source, []).append(edge)


def _in_run_order(node: Node) -> tuple[int, bool, int]:
    # A shared copy is read at the time at which it is made.
    return node.time, node.kind is not NodeKind.COPY, node.id
