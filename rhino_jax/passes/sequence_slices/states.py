"""States of values in a loop over slices of a causal sequence.

The sequence is one factor of S indices. Slices run in order in the forward pass, last
to first in the backward pass. At slice t a sliced value holds rows of that slice; pairs
of tokens (attention scores) hold its rows, and the columns up to its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from rhino_jax.ir.axes import AxisSpan
from rhino_jax.passes.sequence_slices.masks import Bounds


class When(IntEnum):
    """Time from which a value is known in full.

    FORWARD: before the forward pass. BACKWARD: before the backward pass. END: after it.
    """

    FORWARD = 0
    BACKWARD = 1
    END = 2


@dataclass(frozen=True, slots=True)
class Cause:
    """The op for which a value needs all slices.

    Attributes:
      op: its id.
      why: in words, after its name.
    """

    op: int
    why: str


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """State of a value that is known in full, at once.

    Attributes:
      when: before which pass it is known.
      is_free: whether it depends on data and constants alone.
      span: for a free value, the dim that seems to be the sequence; None: none.
      cause: for values known later, why.
    """

    when: When = When.FORWARD
    is_free: bool = False
    span: AxisSpan | None = None
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class RowState:
    """State of a value of which a slice holds its rows.

    Attributes:
      span: the sequence dim.
      is_backward: whether the backward pass computes it.
      may_be_extreme: whether it may contain the values that masks add or subtract.
    """

    span: AxisSpan
    is_backward: bool
    may_be_extreme: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class PairState:
    """State of pairs of tokens: a slice holds its rows, and the columns up to its end.

    Attributes:
      spans: dims of both tokens.
      tokens: ids of these dims, see `flow.RowDims`.
      bounds: of its elements, by place.
      is_backward: whether the backward pass computes it.
    """

    spans: tuple[AxisSpan, AxisSpan]
    tokens: tuple[int, int]
    bounds: Bounds
    is_backward: bool


State = WholeSequence | RowState | PairState
