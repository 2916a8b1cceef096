"""Graph + options → Problem: costs in seconds, memory in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.ir.spec import Spec
from rhino_jax.search.classes import Classes
from rhino_jax.search.graph import Edge, Graph, Node, NodeKind, Port
from rhino_jax.search.makes import Makes
from rhino_jax.search.options import OptionBuilder, Options
from rhino_jax.search.problem import EdgeUsage, NodeUsage, PairTable, Problem
from rhino_jax.search.resharding import ReshardTables
from rhino_jax.search.sizes import PortSpecs, Sizes, SpecTable
from rhino_jax.search.study import Study


SMALL_SHARE = 1e-4
"""Resharded copies smaller than this share of the memory limit are not counted
towards the peak: a thousand of them at once would be 10 %, and few live at once."""

SLICE_NUDGE = 1.001
"""A stacked value resharded before a loop is priced as if each slice were resharded
inside, and a little more: it then holds the whole stack, and nothing hides it."""


Narrow = Callable[[OptionBuilder, list[Options]], list[Options]]
"""Makes shorter lists of options of them all."""


@dataclass(slots=True, eq=False)
class Model:
    """A program's search problem, with all that is needed to read its solution.

    Attributes:
      study: the program, and what is known of it on any mesh.
      builder: made the options.
      options: of every node.
      problem: costs and memory.
      is_narrowed: options were left out that no cost rules out.
    """

    study: Study
    builder: OptionBuilder
    options: list[Options]
    problem: Problem
    is_narrowed: bool = False

    def compute_costs(self) -> list[np.ndarray]:
        """For every node, the seconds of each option that are compute."""
        return _times_run([o.compute_s for o in self.options], self.graph.nodes)

    @property
    def graph(self) -> Graph:
        return self.study.graph

    @property
    def classes(self) -> Classes:
        return self.study.classes

    @property
    def mesh(self) -> LaidMesh:
        return self.builder.mesh

    def spec(self, port: Port, label: int) -> Spec:
        """The spec in which a port holds its value under a choice of its node."""
        return self.options[port.node].strategies[label].results[port.result]

    def wanted(self, edge: Edge, label: int) -> Spec:
        """The spec in which an edge's reader wants its value."""
        strategy = self.options[edge.target].strategies[label]
        return strategy.operands[edge.operand]


def build_model(
    study: Study,
    mesh: LaidMesh,
    pinned: dict[int, Spec],
    memory_budget_bytes: float,
    narrow: Narrow | None = None,
) -> Model:
    """Enumerate options and price them.

    Args:
      study: the program.
      mesh: mesh axes laid over the target's links.
      pinned: node id → spec, for pinned inputs and outputs.
      memory_budget_bytes: per device.
      narrow: leaves options out, or none; see `near`.
    """
    graph, liveness = study.graph, study.liveness
    tile = study.target.device.tile
    sizes = Sizes(SpecTable(), mesh.sizes, tile, study.padded_dims, study.off_lanes)
    builder = OptionBuilder(graph, liveness, mesh, study.target, pinned, sizes)
    options = builder.build()
    every = options
    if narrow is not None:
        options = narrow(builder, options)
    program = graph.program
    costs = _times_run([o.cost_s for o in options], graph.nodes)
    tables = ReshardTables.of(builder)
    problem = Problem(costs, [], limit=memory_budget_bytes, end=graph.end + 2)
    for edge, stop in zip(graph.edges, liveness.copy_last, strict=True):
        source = options[edge.source.node].outs[edge.source.result]
        wanted = options[edge.target].ins[edge.operand]
        whole = program.values[edge.value]
        table = tables.table(source, wanted, whole, *_times_sent(graph, edge))
        problem.edges.append(PairTable(edge.source.node, edge.target, table))
        if whole.bytes > SMALL_SHARE * memory_budget_bytes and _is_copied(graph, edge):
            copies = tables.copies(source, wanted, whole)
            problem.edge_usages.append(
                EdgeUsage(edge.source.node, edge.target, copies, edge.time, stop + 1)
            )
    for port in graph.ports:
        if liveness.is_stored[port.id] and _holds_memory(graph, port):
            usage = _held_bytes(builder, options[port.node].outs[port.result], port)
            start, stop = liveness.first[port.id], liveness.last[port.id]
            problem.node_usages.append(NodeUsage(port.node, usage, start, stop + 1))
    for copy in liveness.hoisted:
        usage = copy.whole_bytes * builder.sizes.shares(options[copy.node].ins[0])
        problem.node_usages.append(
            NodeUsage(copy.node, usage, copy.start, copy.stop + 1)
        )
    return Model(study, builder, options, problem, options is not every)


def _times_run(seconds: list[np.ndarray], nodes: list[Node]) -> list[np.ndarray]:
    """Of all runs."""
    makes, pairs = Makes(), zip(seconds, nodes, strict=True)
    return [makes.scaled(each, node.count) for each, node in pairs]


def _times_sent(graph: Graph, edge: Edge) -> tuple[float, float]:
    """How often bytes and latency of a reshard on this edge are paid."""
    target = graph.nodes[edge.target]
    count = float(edge.count)
    if target.kind is not NodeKind.SLICE:
        return count, count
    assert target.op is not None and target.op.call is not None
    return SLICE_NUDGE * count, SLICE_NUDGE * count * target.op.call.trip_count


def _is_copied(graph: Graph, edge: Edge) -> bool:
    """Whether a reshard on this edge makes a second buffer: a value that goes
    into a loop's stack or out of the program is written where it belongs."""
    return graph.nodes[edge.target].kind not in (
        NodeKind.STACK,
        NodeKind.OUTPUT,
        NodeKind.INPUT,
        NodeKind.JOIN,
    )


def _holds_memory(graph: Graph, port: Port) -> bool:
    """Border nodes that only pass a value on hold none of their own."""
    kind = graph.nodes[port.node].kind
    if kind is NodeKind.CARRY:
        return port.result == 0
    return kind in (NodeKind.INPUT, NodeKind.OP, NodeKind.STACK)


def _held_bytes(builder: OptionBuilder, specs: PortSpecs, port: Port) -> np.ndarray:
    node = builder.graph.nodes[port.node]
    value = node.value
    if node.kind is NodeKind.OP:
        assert node.op is not None
        value = node.op.results[port.result]
    return builder.sizes.held_bytes(specs, builder.graph.program.values[value])
