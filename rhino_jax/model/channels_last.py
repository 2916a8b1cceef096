"""Kernels that bring values into the order in which convolutions read and write them.

A GPU's collectives send whole blocks: what is gathered or scattered lies with the cut
dim first. cuDNN reads and writes channels last. Between batch and channels an
all-to-all needs no other order at the end where the batch is cut in blocks; at the
other, pieces of channels lie one behind the other, and a kernel of its own brings them
together where a convolution reads them, or apart where it made them. An elementwise
op in its place does that as it reads or writes, for nothing.

Weights and their gradients are left out: those lie otherwise in a program than in
cuDNN, and are transposed whether they are sent or not.

Source: openxla/xla, xla/service/gpu/transforms/layout_assignment.cc (`MoveDimToMajor`
of all-gather, all-to-all and reduce-scatter; NHWC convolutions). Seen in HLO of jax
0.12.0.1, 8 H100: of the first 14 all-to-alls of a Wide-ResNet each has a transposing
fusion on the side where channels are cut, two of them a second one (another cut,
another reader). Dims are taken to lie as the program has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.analysis.slack import COMBINED
from rhino_jax.cost.compute import op_s
from rhino_jax.ir.program import Value
from rhino_jax.ir.spec import Spec, axes_of, local_shape
from rhino_jax.ir.traits import OpKind
from rhino_jax.model.options import Options
from rhino_jax.model.sizes import LocalSizes, PortSpecs
from rhino_jax.model.strategies import Strategy


@dataclass(frozen=True, slots=True, eq=False)
class ChannelsLast:
    """Prices these kernels.

    Attributes:
      analysis: what is planned.
      sizes: of values, under lists of specs.
    """

    analysis: ProgramAnalysis
    sizes: LocalSizes
    _tables: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)

    def ends(self) -> np.ndarray:
        """[edges, 2], whether a convolution makes what an edge carries, and whether one
        reads it, through a copy that several share too."""
        graph = self.analysis.graph
        found = np.zeros((len(graph.edges), 2), dtype=bool)
        convolves = self._convolutions()
        if not convolves.any():
            return found
        reads = convolves.copy()
        for node in graph.nodes:
            if node.kind is NodeKind.COPY:
                readers = [e.target for e in graph.outgoing[node.id]]
                reads[node.id] = convolves[readers].any()
        columns = graph.columns
        found[:, 0] = convolves[columns.maker[columns.source]]
        found[:, 1] = reads[columns.target]
        found[np.isin(self.analysis.slack.edges, COMBINED)] = False
        return found

    def _convolutions(self) -> np.ndarray:
        """[nodes], whether they are calls of cuDNN."""
        nodes = self.analysis.graph.nodes
        if not self.analysis.target.device.calls_cudnn:
            return np.zeros(len(nodes), dtype=bool)
        kinds = [None if n.op is None else n.op.traits.kind for n in nodes]
        return np.array([k is OpKind.CONVOLUTION for k in kinds], dtype=bool)

    def table(
        self, source: PortSpecs, target: PortSpecs, value: Value, ends: np.ndarray
    ) -> np.ndarray:
        """Seconds for every option of the source and of the target.

        Args:
          source, target: specs at both ends of an edge.
          value: what it carries.
          ends: [2], see there.
        """
        is_made, is_read = bool(ends[0]), bool(ends[1])
        key = source.key, target.key, value.shape, value.dtype, is_made, is_read
        found = self._tables.get(key)
        if found is None:
            specs = self.sizes.table.specs
            have, want = ([specs[k] for k in p.unique] for p in (source, target))
            small = [
                [self._move_s(a, b, value, is_made, is_read) for b in want]
                for a in have
            ]
            found = np.array(small)[np.ix_(source.index, target.index)]
            self._tables[key] = found
        return found

    def _move_s(
        self, have: Spec, want: Spec, value: Value, is_made: bool, is_read: bool
    ) -> float:
        used, seconds = axes_of(have), 0.0
        pairs = list(enumerate(zip(have, want, strict=True)))
        parted = [d for d, (h, w) in pairs if used & (set(w) - set(h))]
        joined = [d for d, (h, w) in pairs if w[: len(h)] != h]
        if is_made and any(self._is_inside(d, have, value) for d in parted):
            seconds += self._kernel_s(have, value)
        if is_read and any(self._is_inside(d, want, value) for d in joined):
            seconds += self._kernel_s(want, value)
        return seconds

    def _is_inside(self, dim: int, spec: Spec, value: Value) -> bool:
        """Whether other dims lie before it on one device."""
        local = local_shape(spec, value.shape, self.sizes.mesh_sizes)
        return math.prod(local[:dim]) > 1

    def _kernel_s(self, spec: Spec, value: Value) -> float:
        """Seconds of reading and writing what one device has of a value."""
        target = self.analysis.target
        items = math.prod(local_shape(spec, value.shape, self.sizes.mesh_sizes))
        whole = max(1, math.prod(value.shape))
        traffic = np.array([2.0 * value.bytes * items / whole])
        return (
            float(op_s(target, np.zeros(1), traffic, value.dtype)[0]) + target.launch_s
        )

    def with_scatters(self, options: Sequence[Options]) -> list[Options]:
        """The options of convolutions where what they scatter is brought in order."""
        changed, analysis = list(options), self.analysis
        found: dict[tuple[object, ...], Options] = {}
        is_call = self._convolutions()
        is_call[np.isin(analysis.slack.nodes, COMBINED)] = False
        for at in np.flatnonzero(is_call).tolist():
            own, op = options[at], analysis.graph.nodes[at].op
            assert op is not None
            value = analysis.graph.program.values[op.results[0]]
            key = id(own), value.shape, value.dtype
            if key not in found:
                added = np.array([self._scatter_s(s, value) for s in own.strategies])
                found[key] = replace(
                    own, cost_s=own.cost_s + added, compute_s=own.compute_s + added
                )
            changed[at] = found[key]
        return changed

    def _scatter_s(self, strategy: Strategy, value: Value) -> float:
        made, done = strategy.made[0], strategy.results[0]
        parted = [d for d, (m, r) in enumerate(zip(made, done, strict=True)) if m != r]
        is_moved = any(self._is_inside(d, made, value) for d in parted)
        return self._kernel_s(made, value) if is_moved else 0.0
