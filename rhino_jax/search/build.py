"""Graph + options → Problem: costs in seconds, memory in bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.cost.collectives import collective_s
from rhino_jax.cost.reshard import reshard_steps
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Value
from rhino_jax.ir.spec import Spec, shards_per_dim
from rhino_jax.search.graph import Edge, Graph, NodeKind, Port
from rhino_jax.search.liveness import Liveness, analyse
from rhino_jax.search.options import OptionBuilder, Options, PortSpecs
from rhino_jax.search.problem import EdgeUsage, NodeUsage, PairTable, Problem
from rhino_jax.search.stored import Fusing


SMALL_SHARE = 1e-4
"""Resharded copies smaller than this share of the memory limit are not counted
towards the peak: a thousand of them at once would be 10 %, and few live at once."""

TIE_S = 1e-12
"""Price of any change of layout that costs nothing else, so that ties are broken
towards no change; far below the nanosecond in which objectives are compared."""

SLICE_NUDGE = 1.001
"""A stacked value resharded before a loop is priced as if each slice were resharded
inside, and a little more: it then holds the whole stack, and nothing hides it."""


Narrow = Callable[[OptionBuilder, list[Options]], list[Options]]
"""Makes shorter lists of options of them all."""


@dataclass(slots=True, eq=False)
class Model:
    """A program's search problem, with all that is needed to read its solution.

    Attributes:
      graph, liveness: the program.
      builder: made the options.
      options: of every node.
      problem: costs and memory.
      is_narrowed: options were left out that no cost rules out.
    """

    graph: Graph
    liveness: Liveness
    builder: OptionBuilder
    options: list[Options]
    problem: Problem
    is_narrowed: bool = False

    def compute_costs(self) -> list[np.ndarray]:
        """For every node, the seconds of each option that are compute."""
        return [
            o.compute_s * node.count
            for o, node in zip(self.options, self.graph.nodes, strict=True)
        ]

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


@dataclass(slots=True, eq=False)
class _ReshardTables:
    """Reshard costs between lists of specs: seconds = fixed + bytes · per_byte.

    Attributes:
      builder: its spec table numbers the specs.
      fixed_s, s_per_byte: for every pair of specs met; NaN where not met yet.
    """

    builder: OptionBuilder
    fixed_s: np.ndarray
    s_per_byte: np.ndarray
    _kinds: tuple[int, ...]
    _priced: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    _lists: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict
    )
    _tables: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)
    _of_values: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)
    _copies: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, builder: OptionBuilder) -> _ReshardTables:
        count = len(builder.table.specs)
        links = [
            (a.size, a.alpha_s, a.bytes_per_s, a.topology) for a in builder.mesh.axes
        ]
        return cls(
            builder,
            np.full((count, count), np.nan),
            np.full((count, count), np.nan),
            tuple(links.index(link) for link in links),
        )

    def _meet(self, a: int, b: int) -> None:
        """Price one pair of specs."""
        specs = self.builder.table.specs
        key = self._alike(specs[a], specs[b])
        found = self._priced.get(key)
        if found is None:
            found = self._priced[key] = self._price(specs[a], specs[b])
        self.fixed_s[a, b], self.s_per_byte[a, b] = found

    def _alike(self, src: Spec, dst: Spec) -> tuple[object, ...]:
        """The pair with its axes numbered as they are met, equal axes alike: pairs
        that differ only in which of several equal axes they name cost the same."""
        names: dict[int, tuple[int, int]] = {}
        counts = [0] * len(self._kinds)
        key: list[object] = []
        for spec in (src, dst):
            for dim in spec:
                for axis in dim:
                    name = names.get(axis)
                    if name is None:
                        kind = self._kinds[axis]
                        name = names[axis] = (kind, counts[kind])
                        counts[kind] += 1
                    key.append(name)
                key.append(None)
        return tuple(key)

    def _price(self, src: Spec, dst: Spec) -> tuple[float, float]:
        """Fixed seconds and seconds per byte of one reshard."""
        if src == dst:
            return 0.0, 0.0
        mesh = self.builder.mesh
        # Any change of layout is at least a copy of the new shard, and among free
        # ones none is preferred to some.
        cut = math.prod(shards_per_dim(dst, mesh.sizes))
        fixed, per_byte = TIE_S, 2 / cut / self.builder.target.hbm_bytes_per_s
        # Steps scale with the bytes: take them for 2^40 bytes and divide.
        whole = 1 << 40
        for step in reshard_steps(
            src,
            dst,
            whole,
            mesh.sizes,
            by_axis=mesh.gathers_by_axis,
            says_stops=mesh.says_stops,
        ):
            axes = [mesh.axes[i] for i in step.axes]
            alpha = collective_s(step.kind, 0.0, axes)
            fixed += alpha
            per_byte += (
                collective_s(step.kind, step.local_bytes, axes) - alpha
            ) / whole
        return fixed, per_byte

    def table(
        self,
        source: PortSpecs,
        target: PortSpecs,
        whole: Value,
        count: float,
        latency_count: float,
    ) -> np.ndarray:
        """Seconds for every option of the source and of the target.

        Args:
          source, target: specs at both ends.
          whole: the value.
          count: how often it is carried.
          latency_count: how often latency is paid.
        """
        met = source.key, target.key, whole.shape, whole.bytes, count, latency_count
        found = self._of_values.get(met)
        if found is None:
            found = self._of_values[met] = self._table(
                source, target, whole, count, latency_count
            )
        return found

    def _table(
        self,
        source: PortSpecs,
        target: PortSpecs,
        whole: Value,
        count: float,
        latency_count: float,
    ) -> np.ndarray:
        """The same, one array for all values whose tables are equal."""
        paddings = [self.builder.paddings(p, whole.shape) for p in (source, target)]
        is_padded = any(p is not None for p in paddings)
        shape = whole.shape if is_padded else None
        key = (source.key, target.key, whole.bytes, count, latency_count, shape)
        found = self._tables.get(key)
        if found is None:
            fixed, per_byte = self._coefficients(source, target)
            small = fixed * latency_count + per_byte * whole.bytes * count
            if is_padded:
                have, want = (1.0 if p is None else p for p in paddings)
                most = np.maximum(np.reshape(have, (-1, 1)), np.reshape(want, (1, -1)))
                small = small + per_byte * whole.bytes * count * (most - 1)
            found = small[np.ix_(source.index, target.index)]
            self._tables[key] = found
        return found

    def _coefficients(
        self, source: PortSpecs, target: PortSpecs
    ) -> tuple[np.ndarray, np.ndarray]:
        key = (source.key, target.key)
        found = self._lists.get(key)
        if found is None:
            where = np.ix_(source.unique, target.unique)
            for i, j in np.argwhere(np.isnan(self.fixed_s[where])):
                self._meet(source.unique[i], target.unique[j])
            found = self._lists[key] = (self.fixed_s[where], self.s_per_byte[where])
        return found

    def copies(self, source: PortSpecs, target: PortSpecs, whole: Value) -> np.ndarray:
        """Bytes of the resharded copy for every pair; 0 where none is made."""
        shape = None
        if self.builder.paddings(target, whole.shape) is not None:
            shape = whole.shape
        key = (source.key, target.key, whole.bytes, shape)
        found = self._copies.get(key)
        if found is None:
            fixed, _ = self._coefficients(source, target)
            moved = (fixed > 0)[np.ix_(source.index, target.index)]
            found = moved * (whole.bytes * self.builder.shares(target, shape))[None, :]
            self._copies[key] = found
        return found


def build_model(
    graph: Graph,
    mesh: LaidMesh,
    target: Target,
    pinned: dict[int, Spec],
    memory_budget_bytes: float,
    narrow: Narrow | None = None,
) -> Model:
    """Enumerate options and price them.

    Args:
      graph: from `flatten`.
      mesh: mesh axes laid over the target's links.
      target: the hardware.
      pinned: node id → spec, for pinned inputs and outputs.
      memory_budget_bytes: per device.
      narrow: leaves options out, or none; see `near`.
    """
    liveness = analyse(graph, Fusing.of(target.device))
    builder = OptionBuilder(graph, liveness, mesh, target, pinned)
    options = builder.build()
    every = options
    if narrow is not None:
        options = narrow(builder, options)
    program = graph.program
    costs = [
        o.cost_s * node.count for o, node in zip(options, graph.nodes, strict=True)
    ]
    tables = _ReshardTables.of(builder)
    problem = Problem(costs, [], limit=memory_budget_bytes, end=graph.end + 2)
    for edge, (start, stop) in zip(graph.edges, liveness.edge_interval, strict=True):
        source = options[edge.source.node].outs[edge.source.result]
        wanted = options[edge.target].ins[edge.operand]
        whole = program.values[edge.value]
        table = tables.table(source, wanted, whole, *_times_run(graph, edge))
        problem.edges.append(PairTable(edge.source.node, edge.target, table))
        if whole.bytes > SMALL_SHARE * memory_budget_bytes and _is_copied(graph, edge):
            copies = tables.copies(source, wanted, whole)
            problem.edge_usages.append(
                EdgeUsage(edge.source.node, edge.target, copies, start, stop + 1)
            )
    for port, (start, stop) in liveness.interval.items():
        if liveness.is_stored[port] and _holds_memory(graph, port):
            usage = _local_bytes(builder, options[port.node].outs[port.result], port)
            problem.node_usages.append(NodeUsage(port.node, usage, start, stop + 1))
    for copy in liveness.hoisted:
        usage = copy.whole_bytes * builder.shares(options[copy.node].ins[0])
        problem.node_usages.append(
            NodeUsage(copy.node, usage, copy.start, copy.stop + 1)
        )
    return Model(graph, liveness, builder, options, problem, options is not every)


def _times_run(graph: Graph, edge: Edge) -> tuple[float, float]:
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


def _local_bytes(builder: OptionBuilder, specs: PortSpecs, port: Port) -> np.ndarray:
    node = builder.graph.nodes[port.node]
    value = node.value
    if node.kind is NodeKind.OP:
        assert node.op is not None
        value = node.op.results[port.result]
    whole = builder.graph.program.values[value]
    return whole.bytes * builder.shares(specs, whole.shape)
