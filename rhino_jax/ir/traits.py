"""Traits: the properties of ops that the planner distinguishes.

Each rule states them for its primitives (`frontend/rules/`), users for theirs
(`rhino.register_rule(..., traits=...)`). Everything behind the frontend asks
`Op.traits` and never the primitive's name.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import NamedTuple


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
    ATTENTION: weighted means of values, in one kernel; its scores stay inside.
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
    ATTENTION = "attention"
    KERNEL = "kernel"
    OTHER = "other"


ELEMENTWISE_KINDS = frozenset(
    {OpKind.ELEMENTWISE, OpKind.EXPONENTIAL, OpKind.CONVERSION}
)

MATRIX_KINDS = frozenset({OpKind.CONTRACTION, OpKind.CONVOLUTION, OpKind.ATTENTION})

_SAME_DATA = frozenset(
    {OpKind.IDENTITY, OpKind.CONVERSION, OpKind.BROADCAST, OpKind.MOVEMENT}
)


Groups = tuple[tuple[int | EllipsisType, ...], ...]
"""Sets of positions of operands; `(1, ...)` are all operands from position 1 on."""

EITHER: Groups = ((0,), (1,))
"""Either of two operands, as of a product."""

FROM_ALL: Groups = ((0, ...),)
"""All operands, in one set."""


class Library(NamedTuple):
    """The algorithm of a device library that an op calls, on GPUs.

    Attributes:
      name: "sorting", "fourier", "factoring" (of matrices, and triangular solves);
        empty: none.
      passes: what its reads and writes of operands and results are a multiple of: bytes
        of a sort's keys, dims of a Fourier transform.
    """

    name: str = ""
    passes: float = 1.0


OWN_KERNEL = Library()
"""Of an op that the compiler makes a kernel for."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of an op that do not depend on its shapes.

    Attributes:
      kind: its computation.
      vector_ops: operations of the vector units for one FLOP of an elementwise op, in
        multiply-adds of float32.
      is_expensive: compilers do not compute it twice to save memory traffic, unless the
        target's compiler is known to (`Device.recomputes`). Source: XLA's
        `HloInstruction` costs in xla/service/instruction_fusion.cc, `IsExpensive`.
      fuses_operands: elementwise producers fuse into it, though its own result goes
        through memory, as in XLA's fusion of reductions, updates and copies
        (xla/service/instruction_fusion.cc).
      is_rotation: it rotates a dim, as `jnp.roll` does. Some compilers compute it in
        the fusions of its readers (`Device.fuses_rotations`).
      hosts_fusion: compilers that fuse elementwise ops into contractions
        (`Device.fuses_matmuls`) fuse them into this one. False for products of ragged
        groups: XLA:TPU stores operand and result of a GELU between two of them
        (v5e:2x2, libtpu 0.0.52).
      masks_padding: XLA's partitioner runs it on shards of unequal sizes, with their
        padding masked; so it does for all ops that fuse.
      is_gathered: XLA gathers its operands where each device could work on its shard
        alone, or partitions it wrongly, as convolutions of several groups; a plan runs
        it under `shard_map` (`rhino_jax.runtime.ops_on_shards`).
      is_rounded: its float32 operands may be rounded, as those of products at JAX's
        default precision.
      is_reversal: it reverses dims of its operand, as the gradient of a convolution
        does with the kernel.
      groups: number of matrices of a grouped matmul (ragged groups of rows); 1 for all
        other ops.
      masked: positions of the operands of a grouped matmul that have the rows of the
        groups: compilers that compute every group in full (`Device.masks_groups`) read
        them masked, once for every group.
      is_turned: its second operand is contracted over its minor dim, so that these
        compilers transpose it.
      is_tiled: for a grouped matmul, whether a kernel of rhino's can run it, by its
        dims and types (`rhino_jax.runtime.grouped`).
      input_dilation: for a convolution, number of positions that each element of its
        first operand takes, all but one of them zeros, as in the gradient of a strided
        convolution; of the kernel, where compilers take that for the input.
      updates: position of the operand that it writes into its first one; None: none.
      pads_unevenly: for a convolution, whether its window pads some dim of its first
        operand by more at one end than at the other, as "SAME" does with a stride of 2.
      zero_taps: for a convolution, products over those that count, where cuDNN is
        called with the zeros between the elements of a dilated kernel or input.
      exchanged_taps: for a convolution whose operands compilers exchange, as the input
        is smaller than the kernel: products of all positions and taps over those that
        count; 0 for others.
      channels: for a convolution, positions in its rule of the factors of input
        channels of a group, output channels of a group, and groups; None: of size one.
      is_kernel_gradient: for a convolution, whether it is the gradient of one by its
        kernel.
      library: the algorithm of a device library that it calls.
      moves: sets of operands of whose elements its results consist, moved, repeated or
        left out, with all others fixed: the op commutes with sums, maxima and any other
        elementwise reduction of all operands of one set.
      linear: further sets of operands in which it is jointly linear, with all others
        fixed, up to rounding: `a + b` in both, `((0, 1),)`; `a * b` in either,
        `((0,), (1,))`.
      zeros: further sets of operands: where those of one set are zero, so are the
        results.
      reducer: how it combines elements of its operands ("sum", "max", …): two operands
        elementwise, the elements along dims, or updates with what they are written to.
      accumulates: positions of the operands to which it adds (by `reducer`) the rest.
      compares: the comparison of its two operands that it is, as "<=".
      limit: where it increases: its limit for small operands, as 0 of `exp`.
      is_bounded: its results are moderate, whatever its operands.
      dims_param: name of the parameter that holds the dims of its operands, or the dim,
        along which it works; it treats all other dims alike.
      states_placement: it states how, or where, its operand is stored.
      is_transfer: it copies between the memory of the devices and that of the host.
      has_effects: it does more than return results, or hides what it does: it never
        runs twice.
    """

    kind: OpKind = OpKind.OTHER
    vector_ops: float = 1.0
    is_expensive: bool = False
    fuses_operands: bool = False
    is_rotation: bool = False
    hosts_fusion: bool = False
    masks_padding: bool = False
    is_gathered: bool = False
    is_rounded: bool = False
    is_reversal: bool = False
    input_dilation: int = 1
    updates: int | None = None
    pads_unevenly: bool = False
    zero_taps: float = 1.0
    exchanged_taps: float = 0.0
    groups: int = 1
    masked: tuple[int, ...] = ()
    is_turned: bool = False
    is_tiled: bool = False
    channels: tuple[int | None, ...] = ()
    is_kernel_gradient: bool = False
    library: Library = OWN_KERNEL
    moves: Groups = ()
    linear: Groups = ()
    zeros: Groups = ()
    reducer: str = ""
    accumulates: tuple[int, ...] = ()
    compares: str = ""
    limit: float | None = None
    is_bounded: bool = False
    dims_param: str = ""
    states_placement: bool = False
    is_transfer: bool = False
    has_effects: bool = False

    def commutes_in(
        self, operands: int, reducer: str = "sum"
    ) -> tuple[tuple[int, ...], ...]:
        """Return the sets of operands with whose elementwise reduction it commutes.

        Args:
          operands: number of its operands.
          reducer: of the reduction; "sum" asks for the operands in which it is linear.
        """
        if reducer == "sum":
            return positions(self.moves + self.linear, operands)
        if reducer == self.reducer and self.kind is not OpKind.SCATTER:
            return (tuple(range(operands)),)
        return positions(self.moves, operands)

    def keeps_zeros(self, zeros: Sequence[bool]) -> bool:
        """Whether all results are zero, given whether each operand is."""
        groups = positions(self.moves + self.linear + self.zeros, len(zeros))
        return any(all(zeros[i] for i in group) for group in groups)

    def is_masked(self, tiles_groups: bool) -> bool:
        """Whether compilers that mask ragged groups do so here.

        Args:
          tiles_groups: whether rhino's kernel runs the products that it can run.
        """
        return self.groups > 1 and not (tiles_groups and self.is_tiled)

    @property
    def is_choice(self) -> bool:
        """Whether it chooses, element by element, among its operands."""
        return self.kind is OpKind.ELEMENTWISE and bool(self.moves)

    @property
    def is_elementwise(self) -> bool:
        """Whether an element of its results depends on one of each operand alone."""
        return self.kind in ELEMENTWISE_KINDS

    @property
    def is_contraction(self) -> bool:
        """Whether it runs on the matrix unit: products, convolutions, attention."""
        return self.kind in MATRIX_KINDS

    @property
    def keeps_data(self) -> bool:
        """Whether its result holds the data of its operand, and so is reported under
        that name."""
        return self.kind in _SAME_DATA


def positions(groups: Groups, operands: int) -> tuple[tuple[int, ...], ...]:
    """Return sets of operands, of an op that has so many, with `...` written out."""
    found = []
    for group in groups:
        known = tuple(i for i in group if not isinstance(i, EllipsisType))
        rest = range(known[-1] + 1, operands) if len(known) < len(group) else ()
        found.append((*known, *rest))
    return tuple(found)
