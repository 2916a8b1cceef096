"""What an op is, as far as the planner treats ops differently.

Each rule says it of its primitives (`frontend/rules/`), users of theirs
(`rhino.register_rule(..., traits=...)`). Everything behind the frontend asks
`Op.traits` and never the primitive's name.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class OpKind(enum.Enum):
    """What an op computes.

    ELEMENTWISE: every element of a result from those in its place.
    EXPONENTIAL: elementwise, as a softmax has it.
    CONVERSION: elementwise, another element type.
    IDENTITY: its operands as they are, or rounded: copies, barriers, annotations.
    BROADCAST: its operand along new dims.
    MOVEMENT: elements in other places: transposes, reshapes, slices, concatenations.
    GENERATOR: elements from their place and a key: iota, random bits.
    CONTRACTION: sums of products over dims of two operands: matrix products.
    CONVOLUTION: the same under a sliding window.
    REDUCTION: one element from many: sums, maxima, their positions, pooling.
    LOOKUP: rows of its first operand, which others index.
    SCATTER: rows written, or combined, where others index.
    UPDATE: a block of its first operand overwritten.
    KERNEL: a body that is not looked into.
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
    """What is true of an op whatever its shapes.

    Attributes:
      kind: what it computes.
      is_expensive: compilers do not compute it twice to save memory, unless a target
        says that its compiler does (`Device.recomputes`). Source: XLA's
        `HloInstruction` costs in xla/service/instruction_fusion.cc, `IsExpensive`.
      fuses_operands: it computes elementwise operands on the fly, though its own
        result goes through memory, as XLA's fusion does for reductions, updates and
        copies (xla/service/instruction_fusion.cc).
      hosts_fusion: compilers that fuse elementwise ops into contractions
        (`Device.fuses_matmuls`) fuse them into this one. Not into products of ragged
        groups: of a GELU between two, XLA:TPU stores operand and result (v5e:2x2,
        libtpu 0.0.52).
      masks_padding: besides ops that fuse, XLA's partitioner runs it on shards of
        unequal sizes, what pads them masked.
      is_gathered: XLA gathers its operands where each device could do its part alone,
        or partitions it wrongly, as convolutions of several groups; run by `shard_map`
        in a plan (`rhino_jax.runtime.on_shards`).
      is_reversal: its operand with dims reversed, as the gradient of a convolution
        reads a kernel.
      groups: of a product of ragged groups of rows, how many matrices there are; 1 of
        all else.
      masked: of such a product, the operands that have rows of the groups: compilers
        that compute every group in full (`Device.masks_groups`) read them masked, once
        for every group.
      is_turned: its second operand is contracted over its minor dim; they move it.
      input_dilation: of a convolution, into how many places each element of what is
        convolved is put, with zeros in the others, as in the gradient of strides.
    """

    kind: OpKind = OpKind.OTHER
    is_expensive: bool = False
    fuses_operands: bool = False
    hosts_fusion: bool = False
    masks_padding: bool = False
    is_gathered: bool = False
    is_reversal: bool = False
    input_dilation: int = 1
    groups: int = 1
    masked: tuple[int, ...] = ()
    is_turned: bool = False

    @property
    def is_contraction(self) -> bool:
        """Whether the matrix unit runs it: matrix products and convolutions."""
        return self.kind in (OpKind.CONTRACTION, OpKind.CONVOLUTION)

    @property
    def keeps_data(self) -> bool:
        """Whether a result still goes by the name of what the op reads."""
        return self.kind in _SAME_DATA
