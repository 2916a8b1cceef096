"""Traits: the properties of ops that the planner distinguishes.

Each rule states them for its primitives (`frontend/rules/`), users for theirs
(`rhino.register_rule(..., traits=...)`). Everything behind the frontend asks
`Op.traits` and never the primitive's name.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class OpKind(enum.Enum):
    """The computation of an op.

    ELEMENTWISE: every element of a result from the operands' elements at its position.
    EXPONENTIAL: elementwise, as in a softmax.
    CONVERSION: elementwise, to another element type.
    IDENTITY: its operands unchanged, or rounded: copies, barriers, annotations.
    BROADCAST: its operand repeated along new dims.
    MOVEMENT: elements at other positions: transposes, reshapes, slices, concatenations.
    GENERATOR: elements from their position and a key: iota, random bits.
    CONTRACTION: sums of products over dims of two operands: matrix products.
    CONVOLUTION: sums of products under a sliding window.
    REDUCTION: one element from many: sums, maxima, their positions, pooling.
    LOOKUP: rows of its first operand at the indices that others hold.
    SCATTER: rows written, or combined, at the indices that an operand holds.
    UPDATE: a block of its first operand overwritten.
    KERNEL: an opaque body.
    OTHER: none of these: sorts, factorisations, running sums, bookkeeping.
    """

    ELEMENTWISE = "elementwise"
    EXPONENTIAL = "exponential"
    CONVERSION = "conversion"
    IDENTITY = "identity"
    BROADCAST = "broadcast"
    MOVEMENT = "movement"
    GENERATOR = "generator"
    CONTRACTION = "contraction"
    CONVOLUTION = "convolution"
    REDUCTION = "reduction"
    LOOKUP = "lookup"
    SCATTER = "scatter"
    UPDATE = "update"
    KERNEL = "kernel"
    OTHER = "other"


_SAME_DATA = frozenset(
    {OpKind.IDENTITY, OpKind.CONVERSION, OpKind.BROADCAST, OpKind.MOVEMENT}
)


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of an op that do not depend on its shapes.

    Attributes:
      kind: its computation.
      is_expensive: compilers do not compute it twice to save memory traffic, unless the
        target's compiler is known to (`Device.recomputes`). Source: XLA's
        `HloInstruction` costs in xla/service/instruction_fusion.cc, `IsExpensive`.
      fuses_operands: elementwise producers fuse into it, though its own result goes
        through memory, as in XLA's fusion of reductions, updates and copies
        (xla/service/instruction_fusion.cc).
      hosts_fusion: compilers that fuse elementwise ops into contractions
        (`Device.fuses_matmuls`) fuse them into this one. False for products of ragged
        groups: XLA:TPU stores operand and result of a GELU between two of them
        (v5e:2x2, libtpu 0.0.52).
      masks_padding: XLA's partitioner runs it on shards of unequal sizes, with their
        padding masked; so it does for all ops that fuse.
      is_gathered: XLA gathers its operands where each device could work on its shard
        alone, or partitions it wrongly, as convolutions of several groups; a plan runs
        it under `shard_map` (`rhino_jax.runtime.on_shards`).
      is_reversal: it reverses dims of its operand, as the gradient of a convolution
        does with the kernel.
      groups: number of matrices of a grouped matmul (ragged groups of rows); 1 for all
        other ops.
      masked: positions of the operands of a grouped matmul that have the rows of the
        groups: compilers that compute every group in full (`Device.masks_groups`) read
        them masked, once for every group.
      is_turned: its second operand is contracted over its minor dim, so that these
        compilers transpose it.
      input_dilation: for a convolution, number of positions that each element of its
        first operand takes, all but one of them zeros, as in the gradient of a strided
        convolution.
      kernel_dilation: for a convolution, number of taps over those that its kernel has,
        where zeros take the places between the elements of a dilated kernel.
    """

    kind: OpKind = OpKind.OTHER
    is_expensive: bool = False
    fuses_operands: bool = False
    hosts_fusion: bool = False
    masks_padding: bool = False
    is_gathered: bool = False
    is_reversal: bool = False
    input_dilation: int = 1
    kernel_dilation: float = 1.0
    groups: int = 1
    masked: tuple[int, ...] = ()
    is_turned: bool = False

    @property
    def is_contraction(self) -> bool:
        """Whether it runs on the matrix unit: matrix products and convolutions."""
        return self.kind in (OpKind.CONTRACTION, OpKind.CONVOLUTION)

    @property
    def keeps_data(self) -> bool:
        """Whether its result holds the data of its operand, and so is reported under
        that name."""
        return self.kind in _SAME_DATA
