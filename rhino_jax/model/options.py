"""The options of every node: the specs at its ports, and the cost of each.

Options and costs of equal ops are computed once and shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from rhino_jax.analysis.equivalence import Alike, copied_slices, passed_bytes, work_of
from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.analysis.liveness import Liveness
from rhino_jax.analysis.padding import may_pad
from rhino_jax.cost.compute import array_paddings, convolution_work, op_s, traffic_s
from rhino_jax.cost.grouped import aligned_rows, group_tile, tiled_rows
from rhino_jax.errors import PinError
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.hardware.target import Target
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Op, item_bytes
from rhino_jax.ir.spec import (
    OpenSpec,
    Spec,
    format_spec,
    is_within,
    share_of,
)
from rhino_jax.ir.traits import OWN_KERNEL, OpKind
from rhino_jax.model.op_collectives import OpCollectives, is_over
from rhino_jax.model.sizes import LocalSizes, PortSpecs
from rhino_jax.model.strategies import (
    Places,
    Strategy,
    all_specs,
    local_factors,
    moves,
    shards,
    strategies,
)
from rhino_jax.model.traffic import KernelTraffic, Ports
from rhino_jax.utils.union_find import for_each, number, number_rows


NodePin = tuple[tuple[int, OpenSpec], ...]
"""(result, open spec) of a node: pairs of a result's position and the specs it may
have."""


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """All options of one node.

    Attributes:
      strategies: the options.
      cost_s: [options], seconds of each, for one run.
      compute_s: [options], the part of `cost_s` that is compute.
      flops: [options], floating-point operations of each on one device, for one run.
      ins: for every operand, its specs under the options.
      outs: for every result, its specs under the options.
    """

    strategies: tuple[Strategy, ...]
    cost_s: np.ndarray
    compute_s: np.ndarray
    flops: np.ndarray
    ins: tuple[PortSpecs, ...]
    outs: tuple[PortSpecs, ...]

    def slower(self, seconds: np.ndarray) -> Options:
        """Return the options with more compute: [options], seconds for one run."""
        cost_s, compute_s = self.cost_s + seconds, self.compute_s + seconds
        return replace(self, cost_s=cost_s, compute_s=compute_s)


class _Draft(NamedTuple):
    """The part of options that ops share whichever of their values are in memory.

    Attributes:
      strategies, flops: as in `Options`.
      ports: the specs under the strategies.
      arithmetic: [strategies], operations that take time, including the idle parts of
        systolic arrays.
      on_vectors: [strategies], operations on vector units that take time, where the
        target models them.
      steps_s: [strategies], seconds of collectives.
    """

    strategies: tuple[Strategy, ...]
    flops: np.ndarray
    ports: Ports
    arithmetic: np.ndarray
    on_vectors: np.ndarray
    steps_s: np.ndarray


@dataclass(slots=True)
class OptionBuilder:
    """Builds the options of the nodes of a graph.

    Attributes:
      graph, liveness, alike: the program and its analyses.
      mesh, target: the mesh and hardware that it runs on.
      pinned: node id → the only specs that its results may have.
      sizes: local sizes of values, under lists of specs.
      centres: [nodes], assignments of mesh axes: only options that move at most one
        mesh axis of one of these are built, see `strategies.enumerate_strategies`;
        empty: all options are.
    """

    graph: Graph
    liveness: Liveness
    alike: Alike
    mesh: LaidMesh
    target: Target
    pinned: dict[int, NodePin]
    sizes: LocalSizes
    centres: Sequence[frozenset[Places]] = ()
    _drafts: dict[object, _Draft] = field(default_factory=dict)
    # Keyed by `id` of the strategies, which drafts keep alive.
    _ports: dict[int, Ports] = field(default_factory=dict)
    _sends: OpCollectives = field(init=False)
    _traffic: KernelTraffic = field(init=False)

    def __post_init__(self) -> None:
        self._sends = OpCollectives(self.graph.program, self.mesh)
        self._traffic = KernelTraffic(
            self.graph, self.liveness, self.sizes, self.target
        )

    def build(self) -> list[Options]:
        """Return the options of all nodes: one shared object for all equivalent nodes
        with the same pin."""
        nodes, pins = self.graph.nodes, self.pinned
        kinds = self.alike.nodes
        if pins:
            kinds = number_rows(kinds, number(map(pins.get, range(len(nodes)))))
        if self.centres:
            kinds = number_rows(kinds, number(self.centres))
        return for_each(kinds, lambda n: self.of_node(nodes[n]))

    def of_node(self, node: Node) -> Options:
        """Return the options of one node, computed without sharing."""
        if node.kind is not NodeKind.OP:
            return self._border_options(node)
        pin = self.pinned.get(node.id)
        options = self._op_options(node)
        return options if pin is None else self._pinned(node, options, pin)

    def _pinned(self, node: Node, options: Options, pin: NodePin) -> Options:
        """Return the options of an op whose results have their pinned specs.

        Raises:
          PinError: there are none.
        """
        op = node.op
        assert op is not None
        if op.pin is not None and all(d is not None for d in pin[0][1]):
            # A full pin may state an order of axes that is not among the options.
            spec = tuple(d for d in pin[0][1] if d is not None)
            cut = tuple(
                d for d, n in zip(spec, self._shape(node), strict=True) if n > 1
            )
            one = (Strategy(cut, (spec,), (spec,), (spec,)),)
            return self._finish(node, self._draft_of(node, one))
        allowed = [
            k
            for k, s in enumerate(options.strategies)
            if all(is_within(s.results[result], spec) for result, spec in pin)
        ]
        if allowed:
            return self.restricted(options, np.array(allowed))
        names = self.mesh.names
        raise PinError(
            f"a pin asks of `{op.name}` what it cannot make.",
            where=f"{op.source}",
            numbers=f"shape {list(self._shape(node))}, pinned "
            + ", ".join(format_spec(spec, names) for _, spec in pin),
            fix="hold a copy of it instead: rhino.pin(x, spec) in the function; or pin"
            " what reads it.",
        )

    def _below_stack(self, node: Node, pin: OpenSpec) -> OpenSpec:
        """Return the pin of the slices that a pin of a loop's stack implies.

        Raises:
          PinError: it shards the dim over which the loop runs.
        """
        if node.kind is not NodeKind.STACK:
            return pin
        if pin[0]:
            raise PinError(
                "a pin cuts the dim over which a loop runs.",
                where=str(node.op.source) if node.op else "",
                numbers=f"dim 0, pinned {format_spec(pin, self.mesh.names)}",
                fix="leave it whole: rhino.pin(x, PartitionSpec(None, …)); what is made"
                " of the stack may be pinned otherwise.",
            )
        return pin[1:]

    def _shape(self, node: Node) -> tuple[int, ...]:
        return self.graph.program.values[node.value].shape

    def _border_options(self, node: Node) -> Options:
        value = self.graph.program.values[node.value]
        shape = value.shape
        if node.kind is NodeKind.STACK:
            shape = shape[1:]
        passed = passed_bytes(self.graph, self.liveness, node)
        launches = copied_slices(self.graph, self.liveness, node)
        padded: frozenset[int] = frozenset()
        if node.kind in (NodeKind.COPY, NodeKind.CARRY):
            dims = enumerate(shape)
            padded = frozenset(d for d, n in dims if n in self.sizes.padded_dims)
        every = all_specs(shape, self.mesh.sizes, padded, self._centres(node))
        specs = list(every)
        for _, pin in self.pinned.get(node.id, ()):
            specs = _only(specs, self._below_stack(node, pin))
        return self._border(node.kind, specs, passed, launches)

    def _border(
        self, kind: NodeKind, specs: list[Spec], passed: int, launches: int
    ) -> Options:
        stacked: list[Spec] = [((), *spec) for spec in specs]
        ins = stacked if kind is NodeKind.SLICE else specs
        outs = stacked if kind is NodeKind.STACK else specs
        zeros = np.zeros(len(specs))
        taken = self.sizes.table.port(ins)
        made = self.sizes.table.port(outs)
        copy_s = traffic_s(self.target, passed * self.sizes.shares(taken))
        copy_s += self.target.device.launch_s * launches
        # A carry has two results: the one that the body reads, and the result of the
        # loop.
        copies = 2 if kind is NodeKind.CARRY else 1
        return Options(
            tuple(
                Strategy((), (i,), (o,) * copies, (o,) * copies)
                for i, o in zip(ins, outs, strict=True)
            ),
            copy_s,
            copy_s,
            zeros,
            (taken,),
            (made,) * copies,
        )

    def _op_options(self, node: Node) -> Options:
        op = node.op
        assert op is not None and op.rule is not None
        vector_ops = self.liveness.kernels.vector_ops[node.id]
        zero_taps = self.liveness.zero_taps[node.id]
        work = work_of(op, self.alike.types)
        key = work, self._centres(node), vector_ops, zero_taps
        draft = self._drafts.get(key)
        if draft is None:
            draft = self._drafts[key] = self._draft(node)
        return self._finish(node, draft)

    def _draft(self, node: Node) -> _Draft:
        op, mesh = node.op, self.mesh
        assert op is not None and op.rule is not None
        rule = op.rule
        shapes = tuple(self.graph.program.values[r].shape for r in op.results)
        by_hand = self._by_hand(op)
        if by_hand is not None:
            return self._draft_of(node, (by_hand,))
        padded = may_pad(op, self.sizes.padded_dims)
        found = strategies(rule, shapes, mesh.sizes, padded, self._centres(node))
        return self._draft_of(node, found)

    def _centres(self, node: Node) -> frozenset[Places] | None:
        # A pin may be close to none of them.
        is_near = bool(self.centres) and node.id not in self.pinned
        return self.centres[node.id] if is_near else None

    def _by_hand(self, op: Op) -> Strategy | None:
        """Return the only strategy of an op that its user partitioned manually over
        this very mesh; None for all others."""
        manual, axes = op.manual, self.mesh.axes
        if manual is None or not is_over(manual, self.mesh):
            return None
        place = {a.name: i for i, a in enumerate(axes)}
        ins, outs = (
            tuple(tuple(tuple(place[n] for n in dim) for dim in x) for x in side)
            for side in (manual.operands, manual.results)
        )
        return Strategy((), ins, outs, outs)

    def _draft_of(self, node: Node, found: tuple[Strategy, ...]) -> _Draft:
        op, mesh = node.op, self.mesh
        assert op is not None and op.rule is not None
        rule = op.rule
        if op.flops and not op.is_fusible and is_pure_communication(self.target):
            found = _sharing_work(found, len(mesh.sizes))
        ports = self._ports.get(id(found))
        if ports is None:
            ports = self._ports[id(found)] = self._ports_of(found)
        dims = tuple(f.size for f in rule.factors)
        flops = op.flops * np.array([share_of(s.cut, dims, mesh.sizes) for s in found])
        if op.manual is not None and self._by_hand(op) is not None:
            flops = flops / op.manual.num_shards
        flops = flops * self._group_work(op, rule, found)
        flops = flops * self.liveness.zero_taps[node.id]
        # Elementwise arithmetic overlaps with its memory traffic.
        nothing, traits = 0.0 * flops, op.traits
        arithmetic, on_vectors = nothing if node.is_fusible else flops, nothing
        if node.is_matmul:
            arithmetic = flops * self.array_paddings(op, found)
            if traits.channels and self.target.device.kernels.conv_tile:
                arithmetic = arithmetic * self._convolution_works(op, rule, found)
        elif math.isfinite(self.target.device.kernels.vector_ops_per_s) and (
            traits.kind is OpKind.GENERATOR or traits.library != OWN_KERNEL
        ):
            arithmetic, on_vectors = nothing, flops
        elif vector_ops := self.liveness.kernels.vector_ops[node.id]:
            arithmetic, on_vectors = nothing, vector_ops * flops
        steps_s = self._sends.seconds(op, rule, found)
        return _Draft(found, flops, ports, arithmetic, on_vectors, steps_s)

    def _ports_of(self, found: tuple[Strategy, ...]) -> Ports:
        port = self.sizes.table.port
        return Ports(
            tuple(map(port, zip(*[s.operands for s in found], strict=True))),
            tuple(map(port, zip(*[s.results for s in found], strict=True))),
            tuple(map(port, zip(*[s.made for s in found], strict=True))),
        )

    def _finish(self, node: Node, draft: _Draft) -> Options:
        op, values = node.op, self.graph.program.values
        assert op is not None
        kernels, found = self.liveness.kernels, draft.strategies
        traffic = self._traffic.of(node, draft.ports, len(found))
        is_partial = np.array([s.made != s.results for s in found])
        traffic += self._traffic.updating(node, draft.ports, is_partial)
        if kernels.reads[node.id]:
            traffic *= moves(op, found, self.mesh.sizes)
        traffic += self.sizes.shift_bytes(op, values, found)
        dtype = values[op.operands[0]].dtype if op.operands else "float32"
        fused, written = self._traffic.of_epilogue(node, draft.ports, found)
        device = self.target.device
        if device.masks_groups and op.traits.is_masked(device.tiles_groups):
            masked, more = self._masking(node, draft)
            written, traffic = written + masked, traffic + more
        traffic += self._each_set(node, draft) + fused
        compute_s = op_s(
            self.target,
            draft.arithmetic,
            traffic,
            dtype,
            self._traffic.vector_ops(op, draft.ports, draft.on_vectors),
            op.traits.library,
        )
        if op.traits.channels:
            compute_s += self.target.device.kernels.conv_s
        compute_s += traffic_s(self.target, written)
        compute_s += self.target.device.launch_s * kernels.launches[node.id]
        return Options(
            draft.strategies,
            compute_s + draft.steps_s + self._traffic.transfer_s(op, draft.ports),
            compute_s,
            draft.flops,
            draft.ports.ins,
            draft.ports.outs,
        )

    def _group_work(
        self, op: Op, rule: Rule, found: tuple[Strategy, ...]
    ) -> np.ndarray | float:
        """Return [strategies], how many times its own arithmetic a grouped matmul
        takes: of every group, or of whole tiles of each shard's rows; 1 for others."""
        device, traits = self.target.device, op.traits
        if traits.groups == 1:
            return 1.0
        if device.masks_groups and traits.is_masked(device.tiles_groups):
            return float(traits.groups)
        kinds = [f.kind for f in rule.factors]
        rows = kinds.index(FactorKind.INDEX)
        pieces = shards(found, self.mesh.sizes)[:, rows]
        local = np.ceil(rule.factors[rows].size / pieces)
        if not device.tiles_groups:
            return aligned_rows(local, traits.groups) / local
        dtype = self.graph.program.values[op.operands[0]].dtype
        of_matrices = len(traits.masked) > 1
        tiles = group_tile(local, traits.groups, item_bytes(dtype), of_matrices)
        return tiled_rows(local, traits.groups, tiles) / local

    def _each_set(self, node: Node, draft: _Draft) -> np.ndarray:
        """Return [strategies], the bytes that a shard of a grouped matmul moves again,
        as it runs once for each set of group sizes: matrices that sets share, and sums
        of several."""
        op, values = node.op, self.graph.program.values
        assert op is not None and op.rule is not None
        rule, ports = op.rule, draft.ports
        if op.traits.groups == 1 or len(rule.operands[2]) == 1:
            return np.zeros(len(draft.strategies))
        local = local_factors(rule, draft.strategies, self.mesh.sizes)
        sets = [f for dim in rule.operands[2][:-1] for f in dim]
        found = np.zeros(len(draft.strategies))
        for layout, port, value in (
            (rule.operands[1], ports.ins[1], op.operands[1]),
            (rule.results[0], ports.made[0], op.results[0]),
        ):
            shared = [f for f in sets if all(f not in dim for dim in layout)]
            times = np.prod(local[:, shared], axis=1, initial=1) - 1
            found += times * self.sizes.held_bytes(port, values[value])
        return found

    def _masking(self, node: Node, draft: _Draft) -> tuple[np.ndarray, np.ndarray]:
        """Return [strategies], the bytes of writing a product's operands masked to
        ragged groups, where it is the first that reads them, and the bytes that it
        reads in addition to the operands."""
        op, values = node.op, self.graph.program.values
        assert op is not None
        made, more = np.zeros((2, len(draft.strategies)))
        first = {(m.node, m.operand): m.copies for m in self.liveness.masked}
        for i in range(2):
            size = self.sizes.held_bytes(draft.ports.ins[i], values[op.operands[i]])
            if (copies := first.get((node.id, i))) is not None:
                made += (1 + copies) * size
            if i in op.traits.masked:
                more += (op.traits.groups - 1) * size
        return made, more

    def array_paddings(self, op: Op, found: tuple[Strategy, ...]) -> np.ndarray:
        """Return [strategies], the factor by which a systolic array pads the shards of
        each."""
        pieces = shards(found, self.mesh.sizes)
        side, taps = self.target.device.systolic_array, op.traits.exchanged_taps
        assert op.rule is not None
        return array_paddings(op.rule, pieces, side, taps)

    def _convolution_works(
        self, op: Op, rule: Rule, found: tuple[Strategy, ...]
    ) -> np.ndarray:
        """Return [strategies], how many times its own arithmetic a convolution takes,
        with the channels of each shard."""
        kernels = self.target.device.kernels
        dtype = self.graph.program.values[op.operands[0]].dtype
        found_work = []
        for row in local_factors(rule, found, self.mesh.sizes):
            inputs, outputs, groups = (
                1 if c is None else int(row[c]) for c in op.traits.channels
            )
            found_work.append(convolution_work(
                kernels, inputs, outputs, groups, dtype, op.traits.is_kernel_gradient
            ))  # fmt: skip
        return np.array(found_work)

    def restricted(self, options: Options, allowed: np.ndarray) -> Options:
        """Return the options at the positions `allowed`, which are ascending."""
        specs = self.sizes.table.specs

        def port(whole: PortSpecs) -> PortSpecs:
            return self.sizes.table.port(
                [specs[whole.unique[i]] for i in whole.index[allowed]]
            )

        return Options(
            tuple(options.strategies[k] for k in allowed),
            options.cost_s[allowed],
            options.compute_s[allowed],
            options.flops[allowed],
            tuple(port(p) for p in options.ins),
            tuple(port(p) for p in options.outs),
        )


def _only(specs: list[Spec], pin: OpenSpec) -> list[Spec]:
    """Return the specs that a pin allows; the pin itself, where it leaves no dim
    open."""
    dims = tuple(d for d in pin if d is not None)
    if len(dims) == len(pin):
        return [dims]
    return [s for s in specs if is_within(s, pin)]


def is_pure_communication(target: Target) -> bool:
    """Whether compute takes no time on this target."""
    return math.isinf(target.peak_flops_per_s("float32"))


def _sharing_work(found: tuple[Strategy, ...], num_axes: int) -> tuple[Strategy, ...]:
    """Return the strategies that shard an op over the most mesh axes.

    Where compute is free, full replication would always be best; ops that compute must
    therefore share their work over as many mesh axes as they can.
    """
    used = [sum(len(axes) for axes in s.cut) for s in found]
    most = max(used)
    assert most <= num_axes
    return tuple(s for s, n in zip(found, used, strict=True) if n == most)
