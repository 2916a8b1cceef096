"""States of values in a loop over slices of a causal sequence.

The sequence is one factor of S indices. Slices run in order in the forward pass, last
to first in the backward pass. At slice t a sliced value holds rows of that slice; pairs
of tokens (attention scores) hold its rows, and the columns up to its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum

from rhino_jax.ir.axes import AxisSpan
from rhino_jax.passes.sequence_slices.bounds import Bounds


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
      bounds: for values known before the forward pass, bounds of their elements; None:
        unknown.
      cause: for values known later, why.
    """

    when: When = When.FORWARD
    is_free: bool = False
    span: AxisSpan | None = None
    bounds: Bounds | None = field(default=None, compare=False)
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


class Fill(Enum):
    """Elements of pairs whose column is after their row.

    They are anything, zero (or False), or so low that their exponential is zero.
    """

    ANY = "any"
    ZERO = "zero"
    LOW = "low"


class Seen(IntEnum):
    """Number of columns up to a row that are surely not low.

    NONE: perhaps none. ONE: at least one in every row. ALL: all.
    """

    NONE = 0
    ONE = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class Later:
    """Facts about the elements of token pairs.

    Attributes:
      fill: elements whose column is after their row.
      most: for low ones, an upper bound.
      seen: for the other columns, how many are surely not low.
      leak: in words, what lets later pairs through.
      may_be_low, may_be_high: whether some later columns may be less, or more, than
        what weights and activations give.
    """

    fill: Fill = Fill.ANY
    most: float = 0.0
    seen: Seen = Seen.ALL
    leak: str = ""
    may_be_low: bool = False
    may_be_high: bool = False


class PairState:
    """The row dim of token pairs, shared by all pairs that must agree on it."""

    def __init__(self) -> None:
        self._same: tuple[PairState, bool] | None = None
        self._row: int | None = None

    def _root(self) -> tuple[PairState, bool]:
        if self._same is None:
            return self, False
        pair, turned = self._same
        root, more = pair._root()
        return root, turned != more

    @property
    def row(self) -> int | None:
        """0 or 1; None: not known yet."""
        root, turned = self._root()
        return root._row if root._row is None else root._row ^ turned

    def decide(self, row: int) -> None:
        root, turned = self._root()
        assert root._row in (None, row ^ turned)
        root._row = row ^ turned

    def join(self, other: PairState, turned: bool) -> bool:
        """Whether both can have their rows in the same dim; then they are made to.

        Args:
          other: of the other pairs.
          turned: whether the first dim of the other is this one's second.
        """
        (mine, a), (its, b) = self._root(), other._root()
        turned = turned ^ a ^ b
        if mine is its:
            return not turned
        if mine._row is not None and its._row is not None:
            return mine._row == its._row ^ turned
        if mine._row is not None:
            its._same = mine, turned
        else:
            mine._same = its, turned
        return True


@dataclass(frozen=True, slots=True)
class Cross:
    """State of pairs of tokens: a slice holds its rows, and the columns up to its end.

    Attributes:
      spans: dims of both tokens.
      pair: which of them is the row.
      later: facts about columns after the row.
      is_backward: whether the backward pass computes it.
    """

    spans: tuple[AxisSpan, AxisSpan]
    pair: PairState
    later: Later
    is_backward: bool


State = WholeSequence | RowState | Cross
