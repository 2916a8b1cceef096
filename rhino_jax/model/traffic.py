"""Memory traffic and vector arithmetic of an op's kernel, under each of its strategies.

Bytes in on-chip memory count as many as HBM would move in the same time.

On hardware with tiles a kernel takes the time of one more pass in float32 over its
widest array, with the padding of tiles: a reduction of what it reduces; an elementwise
kernel or a product of its result, unless it stores an array of 4-byte elements as
large. By XLA's estimates a v5e takes 8 bytes an element at 663 GB/s for `x + 1` of
bfloat16, 8 of float32, and 6 for the sum of a row of bfloat16; so do v5p, v6e and tpu7x
at their own rates (80 kernels, libtpu 0.0.52). Convolutions do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rhino_jax.analysis.graph import Graph, Node
from rhino_jax.analysis.in_place import is_into_zeros
from rhino_jax.analysis.kernels import Epilogue
from rhino_jax.analysis.liveness import Liveness
from rhino_jax.analysis.on_chip import is_kept
from rhino_jax.analysis.uses import NOWHERE
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Op, Value, item_bytes
from rhino_jax.ir.traits import OpKind
from rhino_jax.model.sizes import LocalSizes, PortSpecs
from rhino_jax.model.strategies import Strategy


class Ports(NamedTuple):
    """The specs at an op's operands and results under its strategies: `ins` and `outs`
    as in `Options`, and `made` before partial results are combined."""

    ins: tuple[PortSpecs, ...]
    outs: tuple[PortSpecs, ...]
    made: tuple[PortSpecs, ...]


@dataclass(frozen=True, slots=True)
class KernelTraffic:
    """Counts the bytes that kernels read and write.

    Attributes:
      graph, liveness: the program, and which of its values are in which memory.
      sizes: local sizes of values, under lists of specs.
      target: the hardware.
    """

    graph: Graph
    liveness: Liveness
    sizes: LocalSizes
    target: Target

    def of(self, node: Node, ports: Ports, num_strategies: int) -> np.ndarray:
        """Return [strategies], the bytes that an op's kernel reads and writes; 0 of an
        op in a matmul's epilogue."""
        op, values, kernels = node.op, self.graph.program.values, self.liveness.kernels
        assert op is not None
        if node.id in kernels.of_epilogues:
            return np.zeros(num_strategies)
        # Most of an update's bytes are not moved: `updating` takes them off.
        is_update = node.id in self.liveness.in_place
        on_chip = None if is_update else self.liveness.on_chip
        traffic = np.zeros(num_strategies)
        for k, i in enumerate(kernels.reads[node.id]):
            held = self.sizes.held_bytes(ports.ins[i], values[op.operands[i]])
            read = held * kernels.ratio(node, i)
            if i == 0 and (parts := kernels.parts.get(node.id)):
                made = ports.made[0], values[op.results[0]]
                read = np.minimum(held, parts * self.sizes.held_bytes(*made))
            if on_chip is not None and (shards := on_chip.reads[node.id][k]):
                shares = held / values[op.operands[i]].bytes
                slowness = self._slowness(shards, shares, of_peak=node.hosts_fusion)
                read = read * slowness
            traffic += read
        for port in node.ports:
            if self.liveness.is_materialised[port.id]:
                value = values[op.results[port.result]]
                held = self.sizes.held_bytes(ports.made[port.result], value)
                if on_chip is not None and (shards := on_chip.writes[port.id]):
                    shares = held / value.bytes
                    held = held * self._slowness(shards, shares, of_peak=True)
                traffic += held
        return traffic + self._widened(node, ports)

    def _widened(self, node: Node, ports: Ports) -> np.ndarray | float:
        """Return [strategies], the bytes in float32 of a kernel's widest array, where
        the kernel takes one more pass over it (see above); 0 of others."""
        kernels, on_chip = self.liveness.kernels, self.liveness.on_chip
        operand, shards = kernels.widened.get(node.id), 0
        if operand is None or not self.target.device.tile:
            return 0.0
        assert node.op is not None
        values, read = self.graph.program.values, kernels.reads[node.id]
        if operand == NOWHERE:
            port, value = ports.made[0], values[node.op.results[0]]
            shards = on_chip.writes[node.ports[0].id] if on_chip else 0
        else:
            port, value = ports.ins[operand], values[node.op.operands[operand]]
            if on_chip and operand in read:
                shards = on_chip.reads[node.id][read.index(operand)]
        slowness = self._slowness(shards, self.sizes.shares(port), of_peak=False)
        return slowness * self._as_float32(port, value)

    def _as_float32(self, port: PortSpecs, value: Value) -> np.ndarray:
        """Return [strategies], the bytes of a value in float32."""
        held = self.sizes.held_bytes(port, value)
        return held * item_bytes("float32") / item_bytes(value.dtype)

    def of_epilogue(
        self, node: Node, ports: Ports, found: Sequence[Strategy]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return [strategies], the bytes that ops after a matmul move in its kernel,
        sharded as its result, and those that they move in another kernel, where the
        result is summed over devices before them; 0 for other ops."""
        epilogue = self.liveness.kernels.epilogues.get(node.id)
        if epilogue is None:
            return np.zeros(len(found)), np.zeros(len(found))
        made, done = ports.made[0], ports.outs[0]
        is_apart = np.array([bool(s.partial) for s in found]) & epilogue.computes
        fused = np.where(is_apart, 0.0, self._moved(node, epilogue, made))
        apart, port = self._moved(node, epilogue, done), node.ports[0].id
        result, written = self.graph.value(port), map(self.graph.value, epilogue.writes)
        held = self.sizes.held_bytes(done, result)
        if not self.liveness.is_materialised[port]:
            apart += held
        if not self.target.device.tile:
            return fused, np.where(is_apart, apart, 0.0)
        wide = [v for v in written if item_bytes(v.dtype) >= item_bytes("float32")]
        if all(v.shape != result.shape for v in wide):
            apart += self._as_float32(done, result)
        if epilogue.reduces:  # a kernel of its own, which reads the same again
            apart += held + self._moved(node, epilogue._replace(writes=()), done)
            apart += self._as_float32(done, result)
        return fused, np.where(is_apart, apart, 0.0)

    def _moved(self, node: Node, epilogue: Epilogue, port: PortSpecs) -> np.ndarray:
        """Return [strategies], the bytes that a matmul's epilogue moves where it is
        sharded as `port`."""
        on_chip, result = self.liveness.on_chip, self.graph.value(node.ports[0].id)
        moved = [*(p for p, _ in epilogue.reads), *epilogue.writes]
        kept = [0] * len(moved)
        if on_chip is not None:
            first = len(self.liveness.kernels.reads[node.id])
            read = on_chip.reads[node.id][first:]
            kept = [*read, *(on_chip.writes[p] for p in epilogue.writes)]
        shares = self.sizes.shares(port)
        traffic = 0.0 * shares
        for k, value in enumerate(map(self.graph.value, moved)):
            held, is_write = value.bytes * shares, k >= len(epilogue.reads)
            if value.shape == result.shape:
                held = self.sizes.held_bytes(port, value)
            traffic += held * self._slowness(kept[k], shares, of_peak=is_write)
        return traffic

    def transfer_s(self, op: Op, ports: Ports) -> np.ndarray | float:
        """Return [strategies], the seconds of a copy to or from the host's memory; 0 of
        other ops, and where the link's rate is unknown."""
        rate = self.target.device.host_bytes_per_s
        if not op.traits.is_transfer or not rate:
            return 0.0
        value = self.graph.program.values[op.operands[0]]
        return self.sizes.held_bytes(ports.ins[0], value) / rate

    def _slowness(
        self, shards: int, shares: np.ndarray, *, of_peak: bool
    ) -> np.ndarray:
        """Return [strategies], the time of moving a value's bytes over that in HBM.

        Args:
          shards: with which it is on the chip, as in `OnChip`.
          shares: [strategies], local over whole size.
          of_peak: whether a kernel writes it, or a matrix unit reads it.
        """
        device = self.target.device
        rate = device.on_chip_bytes_per_s
        if of_peak:
            rate = device.on_chip_peak_bytes_per_s or rate
        streamed = device.hbm_bytes_per_s * device.memory_efficiency
        return np.where(is_kept(shards, shares), streamed / rate, 1)

    def updating(
        self, node: Node, ports: Ports, is_partial: np.ndarray
    ) -> np.ndarray | float:
        """Return [strategies], the bytes that an update moves in addition to what it
        reads and to its whole result.

        In place, it reads and writes as much of the array as it updates. A scatter
        elsewhere does so in a copy, or in zeros where its result is a partial sum.

        Args:
          node: the update, or any other op.
          ports: the specs under its strategies.
          is_partial: [strategies], whether the result is to be summed.
        """
        op, values = node.op, self.graph.program.values
        assert op is not None
        is_in_place = node.id in self.liveness.in_place
        held, at, traits = self.sizes.held_bytes, op.traits.updates, op.traits
        is_scatter = traits.kind is OpKind.SCATTER
        if at is None or not (is_scatter or is_in_place):
            return 0.0
        whole = held(ports.made[0], values[op.results[0]])
        part = held(ports.ins[at], values[op.operands[at]])
        # The array is the first operand; a slice of it is overwritten unread.
        is_read = 0 in self.liveness.kernels.reads[node.id]
        changed = np.minimum(part, whole) * is_scatter
        less = part - whole - is_read * (whole - changed)
        copied = part + changed if is_read else np.maximum(part - whole, 0.0)
        if is_read and is_into_zeros(self.graph, node):
            return less  # zeros that another kernel wrote
        return np.where(is_partial, copied, less) if is_in_place else copied

    def vector_ops(self, op: Op, ports: Ports, own: np.ndarray) -> np.ndarray:
        """Return [strategies], the operations on vector units, with those of the
        padding of tiles.

        Args:
          op: the op.
          ports: the specs under its strategies.
          own: [strategies], operations without padding.
        """
        if not self.target.device.tile or not own.any():
            return own
        is_sum = op.traits.kind is OpKind.REDUCTION
        port = ports.ins[0] if is_sum else ports.made[0]
        value = self.graph.program.values[op.operands[0] if is_sum else op.results[0]]
        held = self.sizes.held_bytes(port, value)
        return own * held / (value.bytes * self.sizes.shares(port))
