"""Layout kernels around collectives, to and from the order in which cuDNN stores
arrays.

A GPU's collectives send whole blocks: a value that is gathered or scattered has its
sharded dim first in memory. cuDNN reads and writes channels last. An all-to-all between
batch and channels needs no transpose at the end where the batch is sharded in blocks;
at the other end, slices of the channels lie one after the other, and a kernel of its
own joins them where a convolution reads them, or splits them where it wrote them. An
elementwise op in its place does that as it reads or writes, at no cost.

Weights and their gradients are left out: their order in a program differs from cuDNN's,
and they are transposed whether or not they are sent.

Source: openxla/xla, xla/service/gpu/transforms/layout_assignment.cc (`MoveDimToMajor`
of all-gather, all-to-all and reduce-scatter; NHWC convolutions). Seen in HLO of jax
0.12.0.1, 8 H100: each of the first 14 all-to-alls of a Wide-ResNet has a transposing
fusion at the end where channels are sharded, two of them a second one (another
sharding, another reader). The order of dims in memory is taken to be that of the
program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.analysis.slack import COMBINED
from rhino_jax.cost.compute import traffic_s
from rhino_jax.ir.program import Value
from rhino_jax.ir.spec import Spec, local_shape
from rhino_jax.ir.traits import OpKind
from rhino_jax.model.options import Options
from rhino_jax.model.sizes import LocalSizes, PortSpecs


@dataclass(frozen=True, slots=True, eq=False)
class ChannelsLast:
    """The costs of these kernels.

    Attributes:
      analysis: the analysis of the program.
      sizes: local sizes of values, under lists of specs.
    """

    analysis: ProgramAnalysis
    sizes: LocalSizes
    _tables: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)

    def ends(self) -> np.ndarray:
        """Return [edges, 2], whether a convolution computes the value of each edge, and
        whether one reads it, be it through a shared copy."""
        graph = self.analysis.graph
        found = np.zeros((len(graph.edges), 2), dtype=bool)
        convolves = self._convolutions()
        if not convolves.any():
            return found
        reads = convolves.copy()
        for node in graph.nodes:
            if node.kind is NodeKind.COPY:
                readers = [n.id for n in graph.nodes_behind(node.id)]
                reads[node.id] = convolves[readers].any()
        columns = graph.columns
        found[:, 0] = convolves[columns.maker[columns.source]]
        found[:, 1] = reads[columns.target]
        found[np.isin(self.analysis.slack.edges, COMBINED)] = False
        return found

    def _convolutions(self) -> np.ndarray:
        """Return [nodes], whether each is a call of cuDNN."""
        nodes = self.analysis.graph.nodes
        if not self.analysis.target.device.calls_cudnn:
            return np.zeros(len(nodes), dtype=bool)
        return np.array([n.op_kind is OpKind.CONVOLUTION for n in nodes], dtype=bool)

    def table(
        self, source: PortSpecs, target: PortSpecs, value: Value, ends: np.ndarray
    ) -> np.ndarray:
        """Return the seconds of these kernels, [options of the source, options of the
        target].

        Args:
          source, target: specs at both ends of an edge.
          value: the value that the edge carries.
          ends: [2], the edge's row of `ends()`.
        """
        is_made, is_read = bool(ends[0]), bool(ends[1])
        key = source.key, target.key, value.shape, value.dtype, is_made, is_read
        found = self._tables.get(key)
        if found is None:
            specs = self.sizes.table.specs
            have, want = ([specs[k] for k in p.unique] for p in (source, target))
            small = np.zeros((len(have), len(want)))
            parted, joined = _changes(have, want)
            if is_made:
                is_moved = (parted & self._is_inside(have, value)[:, None]).any(axis=2)
                small += is_moved * self._kernel_s(have, value)[:, None]
            if is_read:
                is_moved = (joined & self._is_inside(want, value)).any(axis=2)
                small += is_moved * self._kernel_s(want, value)
            found = self._tables[key] = small[np.ix_(source.index, target.index)]
        return found

    def _is_inside(self, specs: Sequence[Spec], value: Value) -> np.ndarray:
        """Return [specs, dims], whether a dim is not the first in memory on one device:
        dims before it have several elements."""
        before = np.cumprod(self._local(specs, value), axis=1)[:, :-1]
        return np.pad(before > 1, ((0, 0), (1, 0)))[:, : len(value.shape)]

    def _local(self, specs: Sequence[Spec], value: Value) -> np.ndarray:
        """Return [specs, dims], the shape of one device's shard of a value."""
        sizes = self.sizes.mesh_sizes
        every = [local_shape(spec, value.shape, sizes) for spec in specs]
        return np.array(every, dtype=np.int64)

    def _kernel_s(self, specs: Sequence[Spec], value: Value) -> np.ndarray:
        """Return [specs], the seconds of reading and writing one device's shard of a
        value."""
        target, whole = self.analysis.target, max(1, math.prod(value.shape))
        items = self._local(specs, value).prod(axis=1)
        traffic = 2.0 * value.bytes * items / whole
        return traffic_s(target, traffic) + target.device.launch_s

    def with_scatters(self, options: Sequence[Options]) -> list[Options]:
        """Return the options with, for convolutions, the cost of transposing what they
        reduce-scatter."""
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
                made = [s.made[0] for s in own.strategies]
                done = [s.results[0] for s in own.strategies]
                is_parted = np.array(
                    [
                        [m != r for m, r in zip(*both, strict=True)]
                        for both in zip(made, done, strict=True)
                    ]
                )
                is_moved = (is_parted & self._is_inside(made, value)).any(axis=1)
                added = is_moved * self._kernel_s(made, value)
                found[key] = own.slower(added)
            changed[at] = found[key]
        return changed


def _changes(
    have: Sequence[Spec], want: Sequence[Spec]
) -> tuple[np.ndarray, np.ndarray]:
    """Return [have, want, dims], whether a dim gets an axis that another dim has, and
    whether it loses one."""
    numbers: dict[tuple[int, ...], int] = {}

    def numbered(specs: Sequence[Spec]) -> np.ndarray:
        every = [[numbers.setdefault(d, len(numbers)) for d in spec] for spec in specs]
        return np.array(every, dtype=np.int64)

    before, after = numbered(have)[:, None], numbered(want)[None]
    begins = np.array([[d[: len(b)] == b for d in numbers] for b in numbers])
    bits = np.array([sum(1 << a for a in d) for d in numbers], dtype=np.int64)
    used = np.bitwise_or.reduce(bits[before], axis=2, keepdims=True)
    parted = used & bits[after] & ~bits[before] != 0
    return parted, ~begins[before, after]
