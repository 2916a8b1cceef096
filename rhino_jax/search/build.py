"""Graph + options → Problem: costs in seconds, memory in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.ir.spec import Spec
from rhino_jax.search.classes import Classes
from rhino_jax.search.graph import Edge, Graph, Node, NodeKind, Port
from rhino_jax.search.numbering import for_each, number_objects, number_rows
from rhino_jax.search.options import OptionBuilder, Options
from rhino_jax.search.problem import EdgeUsage, NodeUsage, PairTable, Problem
from rhino_jax.search.resharding import ReshardTables
from rhino_jax.search.sizes import Sizes, SpecTable
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
    builder = OptionBuilder(
        graph, liveness, study.alike, mesh, study.target, pinned, sizes
    )
    options = builder.build()
    every = options
    if narrow is not None:
        options = narrow(builder, options)
    kinds = number_objects(options)
    problem = Problem(
        _times_run([o.cost_s for o in options], graph.nodes),
        [],
        limit=memory_budget_bytes,
        end=graph.end + 2,
    )
    _add_edges(problem, study, builder, options, kinds)
    _add_held(problem, study, builder, options, kinds)
    for copy in liveness.hoisted:
        usage = copy.whole_bytes * builder.sizes.shares(options[copy.node].ins[0])
        problem.node_usages.append(
            NodeUsage(copy.node, usage, copy.start, copy.stop + 1)
        )
    return Model(study, builder, options, problem, options is not every)


def _add_edges(
    problem: Problem,
    study: Study,
    builder: OptionBuilder,
    options: list[Options],
    kinds: np.ndarray,
) -> None:
    """What it costs to carry values, and the memory that copies need.

    Args:
      problem: to which they are added.
      study, builder, options: see `build_model`.
      kinds: [nodes], equal numbers for the same options.
    """
    graph, columns = study.graph, study.graph.columns
    values, tables = graph.program.values, ReshardTables.of(builder)
    small = SMALL_SHARE * problem.limit

    def price(number: int) -> tuple[np.ndarray, np.ndarray | None]:
        edge = graph.edges[number]
        source = options[edge.source.node].outs[edge.source.result]
        wanted, whole = options[edge.target].ins[edge.operand], values[edge.value]
        table = tables.table(source, wanted, whole, *_times_sent(graph, edge))
        is_held = whole.bytes > small and _is_copied(graph, edge)
        return table, tables.copies(source, wanted, whole) if is_held else None

    makers = columns.maker[columns.source]
    alike = number_rows(
        kinds[makers],
        columns.result[columns.source],
        kinds[columns.target],
        columns.operand,
        study.alike.types[columns.value],
        columns.count,
        _trips(graph)[columns.target],
    )
    ends = zip(makers.tolist(), columns.target.tolist(), strict=True)
    times = zip(columns.read.tolist(), study.liveness.copy_last, strict=True)
    priced = for_each(alike, price)
    for (source, target), (start, last), (table, copies) in zip(
        ends, times, priced, strict=True
    ):
        problem.edges.append(PairTable(source, target, table))
        if copies is not None:
            usage = EdgeUsage(source, target, copies, start, last + 1)
            problem.edge_usages.append(usage)


def _trips(graph: Graph) -> np.ndarray:
    """[nodes], of what slices a stack how often it does, of others 0."""
    found = np.zeros(len(graph.nodes), dtype=np.int64)
    for node in graph.loop_end:
        op = graph.nodes[node].op
        if graph.nodes[node].kind is NodeKind.SLICE and op is not None:
            assert op.call is not None
            found[node] = op.call.trip_count
    return found


def _add_held(
    problem: Problem,
    study: Study,
    builder: OptionBuilder,
    options: list[Options],
    kinds: np.ndarray,
) -> None:
    """The memory of values; args as of `_add_edges`."""
    graph, liveness, alike = study.graph, study.liveness, study.alike
    ports = [
        port
        for port, is_stored in zip(graph.ports, liveness.is_stored, strict=True)
        if is_stored and _holds_memory(graph, port)
    ]
    values = [_value_of(graph, port) for port in ports]

    def usage(number: int) -> np.ndarray:
        port, value = ports[number], graph.program.values[values[number]]
        specs = options[port.node].outs[port.result]
        return builder.sizes.held_bytes(specs, value)

    held = np.array([port.id for port in ports], dtype=np.int64)
    every = number_rows(
        kinds[graph.columns.maker[held]],
        graph.columns.result[held],
        alike.types[values],
        alike.lanes[values],
    )
    for port, amounts in zip(ports, for_each(every, usage), strict=True):
        start, last = liveness.first[port.id], liveness.last[port.id]
        problem.node_usages.append(NodeUsage(port.node, amounts, start, last + 1))


def _times_run(seconds: list[np.ndarray], nodes: list[Node]) -> list[np.ndarray]:
    """Of all runs."""
    counts = np.array([node.count for node in nodes], dtype=np.int64)
    alike = number_rows(number_objects(seconds), counts)
    return for_each(alike, lambda k: nodes[k].count * seconds[k])


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


def _value_of(graph: Graph, port: Port) -> int:
    node = graph.nodes[port.node]
    if node.kind is NodeKind.OP:
        assert node.op is not None
        return node.op.results[port.result]
    return node.value
