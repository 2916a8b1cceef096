"""What a value is to a loop over slices of a causal sequence.

The sequence is one factor of S indices. Slices run in order in the forward pass, last
to first in the backward pass. What is sliced has, at slice t, rows of that slice; of
pairs of tokens (scores of attention) its rows, and the columns up to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from rhino_jax.passes.microbatch.flow.states import RowsState
from rhino_jax.passes.sequence_slices.bounds import Bounds


@dataclass(frozen=True, slots=True)
class SequenceDim:
    """Where a value has the sequence, or a part of it.

    Attributes:
      dim, outer, inner: the dim is (outer, tokens, inner), major first.
      first: the first token that is there.
      count: how many tokens are.
    """

    dim: int
    outer: int
    inner: int
    first: int
    count: int

    @property
    def rows(self) -> RowsState:
        return RowsState(self.dim, self.outer, self.inner)

    @property
    def is_plain(self) -> bool:
        return self.outer == self.inner == 1

    def resized(self, shape: Sequence[int], tokens: int) -> tuple[int, ...]:
        """The shape with so many tokens there."""
        return self.rows.local(shape, tokens)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Which of the tokens that are there are `start` to `stop` of the sequence."""
        low, high = start - self.first, stop - self.first
        return min(max(low, 0), self.count), min(max(high, 0), self.count)


class When(IntEnum):
    """Before what a value is known in full: the forward pass, the backward pass, or
    what follows it."""

    FORWARD = 0
    BACKWARD = 1
    END = 2


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a value needs all slices.

    Attributes:
      op: its id.
      why: in words, after its name.
    """

    op: int
    why: str


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """Known in full, at once.

    Attributes:
      when: before what.
      is_free: whether it is made of data and constants alone.
      place: of what is free, where it seems to have the sequence.
      bounds: of what is known before the forward pass, what is known of its elements.
      cause: of what is known later, why.
    """

    when: When = When.FORWARD
    is_free: bool = False
    place: SequenceDim | None = None
    bounds: Bounds | None = field(default=None, compare=False)
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class RowState:
    """A slice has its rows.

    Attributes:
      place: where.
      is_backward: whether the backward pass makes it.
      may_be_low: whether what masks add may be in it.
    """

    place: SequenceDim
    is_backward: bool
    may_be_low: bool = field(default=False, compare=False)


class Fill(Enum):
    """What pairs are whose column is after their row: anything, zero (or False), or
    so low that its exponential is zero."""

    ANY = "any"
    ZERO = "zero"
    LOW = "low"


class Seen(IntEnum):
    """How many of the columns up to a row are surely not low: perhaps none, one at
    least in every row, or all."""

    NONE = 0
    ONE = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class Later:
    """What is known of pairs of tokens.

    Attributes:
      fill: what those are whose column is after their row.
      most: of low ones, a bound from above.
      seen: of the others.
      leak: in words, what let pairs through that are later.
    """

    fill: Fill = Fill.ANY
    most: float = 0.0
    seen: Seen = Seen.ALL
    leak: str = ""


class PairState:
    """Which of the two dims of pairs is their row; shared by all that are alike."""

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
        """0 or 1; None: not known."""
        root, turned = self._root()
        return root._row if root._row is None else root._row ^ turned

    def decide(self, row: int) -> None:
        root, turned = self._root()
        assert root._row in (None, row ^ turned)
        root._row = row ^ turned

    def join(self, other: PairState, turned: bool) -> bool:
        """Whether both can have their rows in the same dim; then they do.

        Args:
          other: of the other pairs.
          turned: whether its first dim is this one's second.
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
    """Pairs of tokens: a slice has its rows, and the columns up to its end.

    Attributes:
      places: of both.
      pair: which is the row.
      later: what is known of columns after the row.
      is_backward: whether the backward pass makes it.
    """

    places: tuple[SequenceDim, SequenceDim]
    pair: PairState
    later: Later
    is_backward: bool


State = WholeSequence | RowState | Cross
