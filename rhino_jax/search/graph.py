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
    """

    id: int
    kind: NodeKind
    count: int
    time: int
    op: Op | None
    slot: int
    value: int


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
      run_order: all nodes, what is made before what reads it; set when all are there.
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

    def add(
        self,
        kind: NodeKind,
        count: int,
        time: int,
        op: Op | None,
        slot: int,
        value: int,
    ) -> Node:
        node = Node(len(self.nodes), kind, count, time, op, slot, value)
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
