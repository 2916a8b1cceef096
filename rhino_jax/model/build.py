"""Graph + options → Problem: costs in seconds, memory in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rhino_jax.analysis.convolutions import find_reversals
from rhino_jax.analysis.dim_classes import DimClasses
from rhino_jax.analysis.graph import Edge, Graph, Node, NodeKind, Port
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.cost.corrections import (
    NO_CORRECTIONS,
    CostCorrections,
    CostFactors,
    kind_of_sharding,
    op_key,
)
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.ir.spec import Spec
from rhino_jax.model.channels_last import ChannelsLast
from rhino_jax.model.constants import CONSTANTS
from rhino_jax.model.gpu_kernels import (
    apart_s,
    with_reversals,
    with_second_passes,
)
from rhino_jax.model.op_collectives import sent_value
from rhino_jax.model.options import NodePin, OptionBuilder, Options
from rhino_jax.model.packing import are_combined, with_packing
from rhino_jax.model.resharding import ReshardTables
from rhino_jax.model.sizes import LocalSizes, SpecTable
from rhino_jax.model.strategies import Strategy
from rhino_jax.model.tpu_kernels import padded_copies, with_loops_and_parts
from rhino_jax.solver.problem import EdgeUsage, NodeUsage, PairTable, Problem
from rhino_jax.utils.union_find import for_each, number_objects, number_rows


T = TypeVar("T")

Narrow = Callable[[OptionBuilder], tuple[list[Options], bool]]
"""A function from an option builder to the options of all nodes and whether any option
that could be optimal was left out."""


@dataclass(slots=True, eq=False)
class MeshModel:
    """A program's search problem on one mesh, with everything needed to interpret a
    solution.

    Attributes:
      analysis: the program, and its analyses that hold on any mesh.
      builder: the builder of the options.
      options: [nodes], the options of each.
      problem: costs and memory.
      is_narrowed: whether options were left out that no cost rules out.
    """

    analysis: ProgramAnalysis
    builder: OptionBuilder
    options: list[Options]
    problem: Problem
    is_narrowed: bool = False

    def compute_costs(self) -> list[np.ndarray]:
        """Return [nodes][options], the compute part of each cost in seconds, over all
        runs."""
        return _times_run([o.compute_s for o in self.options], self.graph.nodes)

    @property
    def graph(self) -> Graph:
        return self.analysis.graph

    @property
    def dim_classes(self) -> DimClasses:
        return self.analysis.dim_classes

    @property
    def mesh(self) -> LaidMesh:
        return self.builder.mesh

    def spec(self, port: Port, label: int) -> Spec:
        """Return the spec of a port's value when its node takes the option `label`."""
        return self.options[port.node].strategies[label].results[port.result]

    def wanted(self, edge: Edge, label: int) -> Spec:
        """Return the spec in which an edge's reader reads its value under the option
        `label`."""
        strategy = self.options[edge.target].strategies[label]
        return strategy.operands[edge.operand]


def build_model(
    analysis: ProgramAnalysis,
    mesh: LaidMesh,
    pinned: dict[int, NodePin],
    memory_budget_bytes: float,
    narrow: Narrow | None = None,
    corrections: CostCorrections = NO_CORRECTIONS,
) -> MeshModel:
    """Enumerate options and compute their costs.

    Args:
      analysis: the program.
      mesh: mesh axes laid over the target's links.
      pinned: node id → the pins of its results.
      memory_budget_bytes: bytes per device.
      narrow: enumerates the options; None: enumerates all. See `neighbourhood`.
      corrections: corrections of the ops' costs; collectives are corrected by `mesh`.
    """
    graph, tile = analysis.graph, analysis.target.device.tile
    sizes = LocalSizes(
        SpecTable(), mesh.sizes, tile, analysis.padded_dims, analysis.off_lanes
    )
    builder = OptionBuilder(
        graph, analysis.liveness, analysis.alike, mesh, analysis.target, pinned, sizes
    )
    if narrow is None:
        options, is_narrowed = builder.build(), False
    else:
        options, is_narrowed = narrow(builder)
    options = with_kernels(analysis, mesh, sizes, options)
    if corrections.programs:
        options = corrected(graph, options, CostFactors.of(corrections))
    problem = Problem(
        _times_run([o.cost_s for o in options], graph.nodes),
        [],
        limit=memory_budget_bytes,
        end=graph.end + 2,
    )
    pricing = _Pricing(analysis, builder, options, number_objects(options))
    pricing.add_edges(problem)
    pricing.add_held(problem)
    return MeshModel(analysis, builder, options, problem, is_narrowed)


def with_kernels(
    analysis: ProgramAnalysis,
    mesh: LaidMesh,
    sizes: LocalSizes,
    options: Sequence[Options],
) -> list[Options]:
    """Return the options with the costs of the kernels that compilers add or save:
    equal nodes that share an object of options share one afterwards.

    Args:
      analysis: the program.
      mesh: the mesh.
      sizes: local sizes of values, under lists of specs.
      options: [nodes], the options of each.
    """
    found = with_packing(analysis, mesh, options)
    found = with_reversals(analysis, found)
    found = with_second_passes(analysis, mesh, found)
    found = ChannelsLast(analysis, sizes).with_scatters(found)
    return with_loops_and_parts(analysis, sizes, found)


def corrected(
    graph: Graph, options: Sequence[Options], factors: CostFactors
) -> list[Options]:
    """Return the options with the compute of each multiplied by the factor of its op
    and kind of sharding; equal nodes of one key share an object of options."""
    found: dict[tuple[object, ...], Options] = {}
    changed = list(options)
    for node in graph.nodes:
        if node.op is None:
            continue
        own, key = options[node.id], op_key(node.op.source, node.op.name)
        if (id(own), *key) not in found:
            by_strategy = np.array([
                factors.of_op(key, sharding_of(s)) for s in own.strategies
            ])  # fmt: skip
            more_s = (by_strategy - 1.0) * own.compute_s
            found[id(own), *key] = own.slower(more_s)
        changed[node.id] = found[id(own), *key]
    return changed


def sharding_of(strategy: Strategy) -> str:
    """Return the kind of sharding of an op's strategy, or of a border node's."""
    return kind_of_sharding(strategy.cut or strategy.results[0])


@dataclass(frozen=True, slots=True, eq=False)
class _Pricing:
    """Computes the costs of pairs of options, and the memory of values.

    Attributes:
      analysis, builder, options: as in `MeshModel`.
      kinds: [nodes], equal numbers for the same options.
    """

    analysis: ProgramAnalysis
    builder: OptionBuilder
    options: list[Options]
    kinds: np.ndarray

    def add_edges(self, problem: Problem) -> None:
        """Add the reshard costs of all edges, and the memory of resharded copies."""
        graph, columns = self.analysis.graph, self.analysis.graph.columns
        tables, lowering = ReshardTables.of(self.builder), self.builder.mesh.lowering
        sent = [sent_value(graph, edge, lowering) for edge in graph.edges]
        small = CONSTANTS.small_share * problem.limit
        combined = are_combined(self.analysis)
        sizes, target = self.builder.sizes, self.analysis.target
        reversals = find_reversals(graph) if target.device.calls_cudnn else ()
        in_order = ChannelsLast(self.analysis, sizes)
        convolves = in_order.ends()

        def price(at: int) -> tuple[np.ndarray, np.ndarray | None]:
            edge = graph.edges[at]
            source = self.options[edge.source.node].outs[edge.source.result]
            wanted = self.options[edge.target].ins[edge.operand]
            whole = sent[at]
            count, latencies = _times_sent(graph, edge)
            if combined[at]:
                latencies *= OBSERVED.combined_latency
            table = tables.table(source, wanted, whole, count, latencies)
            if edge.source.node in reversals:
                options = self.options[edge.target]
                longer = apart_s(edge, graph, options, sizes, target)
                table = table + count * longer[None, :] * (table > 0)
            if convolves[at].any():
                moved = in_order.table(source, wanted, whole, convolves[at])
                table = table + count * moved
            is_held = whole.bytes > small and _is_copied(graph, edge)
            return table, tables.copies(source, wanted, whole) if is_held else None

        makers = columns.maker[columns.source]
        alike = number_rows(
            self.kinds[makers],
            columns.result[columns.source],
            self.kinds[columns.target],
            columns.operand,
            self.analysis.alike.types[columns.value],
            columns.count,
            _slices(graph)[columns.target],
            np.array(combined, dtype=bool),
            np.array([value.bytes for value in sent]),
            convolves[:, 0],
            convolves[:, 1],
        )
        ends = zip(makers.tolist(), columns.target.tolist(), strict=True)
        times = zip(
            columns.read.tolist(), self.analysis.liveness.copy_last, strict=True
        )
        priced = zip(ends, times, for_each(alike, price), strict=True)
        for (source, target), (start, last), (table, copies) in priced:
            problem.edges.append(PairTable(source, target, table))
            if copies is not None:
                usage = EdgeUsage(source, target, copies, start, last + 1)
                problem.edge_usages.append(usage)

    def add_held(self, problem: Problem) -> None:
        """Add the memory of values, and of copies of them."""
        graph, liveness = self.analysis.graph, self.analysis.liveness
        sizes, ports = self.builder.sizes, held_ports(self.analysis)

        def held_bytes(port: Port) -> np.ndarray:
            specs = self.options[port.node].outs[port.result]
            return sizes.held_bytes(specs, graph.value(port.id))

        for port, held in self._with_each(ports, held_bytes):
            start, last = liveness.first[port.id], liveness.last[port.id]
            problem.node_usages.append(NodeUsage(port.node, held, start, last + 1))
        for copy in liveness.copies:
            shares = sizes.shares(self.options[copy.node].ins[0])
            held = copy.whole_bytes * shares
            usage = NodeUsage(copy.node, held, copy.start, copy.stop + 1)
            problem.node_usages.append(usage)
        self._add_masked(problem)
        self._add_unscattered(problem)
        problem.node_usages += padded_copies(self.analysis, sizes, self.options)

    def _with_each(
        self, ports: Sequence[Port], compute: Callable[[Port], T]
    ) -> Iterator[tuple[Port, T]]:
        """Yield every port with what `compute` returns for it, which is called once for
        ports of equal options and types of values."""
        alike, graph = self.analysis.alike, self.analysis.graph
        values = [graph.value_id(port.id) for port in ports]
        kinds = number_rows(
            self.kinds[[port.node for port in ports]],
            np.array([port.result for port in ports], dtype=np.int64),
            alike.types[values],
            alike.lanes[values],
        )
        found = for_each(kinds, lambda at: compute(ports[at]))
        yield from zip(ports, found, strict=True)

    def _add_unscattered(self, problem: Problem) -> None:
        """Add the memory of partial results during a reduce-scatter, in addition to its
        result: collectives read and write different buffers (compiled HLO of h100 and
        v5e, jax 0.10.2, libtpu 0.0.52)."""
        graph, sizes = self.analysis.graph, self.builder.sizes
        small = CONSTANTS.small_share * problem.limit
        ports = [p for p in graph.ports if graph.nodes[p.node].kind is NodeKind.OP]

        def partial_bytes(port: Port) -> np.ndarray | None:
            value = graph.value(port.id)
            found = self.options[port.node].strategies
            if value.bytes <= small or not any(s.made != s.results for s in found):
                return None
            made = sizes.table.port([s.made[port.result] for s in found])
            is_sent = np.array([s.made != s.results for s in found])
            return np.where(is_sent, sizes.held_bytes(made, value), 0.0)

        for port, held in self._with_each(ports, partial_bytes):
            if held is not None:
                time = graph.nodes[port.node].time
                usage = NodeUsage(port.node, held, time, time + 1)
                problem.node_usages.append(usage)

    def _add_masked(self, problem: Problem) -> None:
        """Add the memory of operands masked to ragged groups."""

        def read_as(node: int, operand: int) -> tuple[np.ndarray, np.ndarray]:
            """Return, for every option, the bytes of an operand and a number of its
            spec."""
            graph = self.analysis.graph
            op, port = graph.nodes[node].op, self.options[node].ins[operand]
            assert op is not None
            value = graph.program.values[op.operands[operand]]
            specs = np.array(port.unique)[port.index]
            return self.builder.sizes.held_bytes(port, value), specs

        for masked in self.analysis.liveness.masked:
            held = masked.copies * read_as(masked.node, masked.operand)[0]
            usage = NodeUsage(masked.node, held, masked.start, masked.stop + 1)
            problem.node_usages.append(usage)
        for stays in self.analysis.liveness.stay:
            (held, ours), (_, theirs) = map(read_as, stays.nodes, stays.operands)
            both = stays.copies * held[:, None] * (ours[:, None] == theirs[None, :])
            between = EdgeUsage(*stays.nodes, both, stays.start, stays.stop + 1)
            problem.edge_usages.append(between)


def _slices(graph: Graph) -> np.ndarray:
    """Return [nodes], the trip count of the loop for nodes that slice its stack, 0 for
    others."""
    found = np.zeros(len(graph.nodes), dtype=np.int64)
    for n in graph.loop_end:
        node = graph.nodes[n]
        if node.kind is NodeKind.SLICE:
            assert node.op is not None and node.op.call is not None
            found[n] = node.op.call.trip_count
    return found


def _times_run(seconds: list[np.ndarray], nodes: list[Node]) -> list[np.ndarray]:
    """Multiply the seconds of each node's options, per run, by its runs."""
    counts = np.array([node.count for node in nodes], dtype=np.int64)
    alike = number_rows(number_objects(seconds), counts)
    return for_each(alike, lambda k: nodes[k].count * seconds[k])


def _times_sent(graph: Graph, edge: Edge) -> tuple[float, float]:
    """Return how often the bytes and the latency of a reshard on this edge are paid."""
    target = graph.nodes[edge.target]
    count = float(edge.count)
    if target.kind is not NodeKind.SLICE:
        return count, count
    assert target.op is not None and target.op.call is not None
    count *= CONSTANTS.slice_factor
    return count, count * target.op.call.trip_count


def _is_copied(graph: Graph, edge: Edge) -> bool:
    """Whether a reshard on this edge allocates a second buffer: a value that goes into
    a loop's stack or out of the program is written in place."""
    return graph.nodes[edge.target].kind not in (
        NodeKind.STACK,
        NodeKind.OUTPUT,
        NodeKind.INPUT,
        NodeKind.JOIN,
    )


def held_ports(analysis: ProgramAnalysis) -> list[Port]:
    """Return the ports whose values are in memory, in the order of the first usages of
    a model's nodes."""
    ports = zip(analysis.graph.ports, analysis.liveness.is_held, strict=True)
    return [p for p, is_it in ports if is_it and _holds_memory(analysis.graph, p)]


def _holds_memory(graph: Graph, port: Port) -> bool:
    """Whether a port has a buffer of its own: border nodes that only forward a value
    have none."""
    kind = graph.nodes[port.node].kind
    if kind is NodeKind.CARRY:
        return port.result == 0
    return kind in (NodeKind.INPUT, NodeKind.OP, NodeKind.STACK)
