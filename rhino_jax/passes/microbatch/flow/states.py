"""What a value is to a loop over pieces of the batch, and how dims hold the batch.

The batch is one factor of `rows` indices. A dim that holds it is the product
(outer, rows, inner), major first: `[B, S]` has (1, B, 1), the merged dim of `[B·S]`
has (1, B, S). A piece has some of the rows, and of that dim (outer, its rows, inner).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rhino_jax.ir.factor import FactorKind, Layout, Rule


@dataclass(frozen=True, slots=True)
class WholeState:
    """Known in full before loop `phase` runs.

    Attributes:
      phase: how many loops run before it is known.
      is_zero: whether every element is zero.
      is_inside: made inside loop `phase`, and the same in every piece.
      is_own: not the same in every piece, as it was asked for: each has what its own
        rows make of it. Outside, the mean of the pieces' stands for it.
    """

    phase: int = 0
    is_zero: bool = False
    is_inside: bool = False
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class RowsState:
    """Made inside loop `phase`: a piece has its rows of `dim`.

    Attributes:
      dim, outer, inner: where the batch is.
      phase: the first loop that can make it.
      cheap: how many loops run before it may be made in full, cheaply, outside of
        loops; None: it is not cheap.
      is_own: as an op reads a sum over the batch: rows of what a piece's own rows make
        of it.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    phase: int = 0
    cheap: int | None = None
    is_own: bool = False

    def local(self, shape: Sequence[int], rows: int) -> tuple[int, ...]:
        """The shape of a piece of so many rows."""
        size = self.outer * rows * self.inner
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def moved(self, by: int) -> RowsState:
        return replace(self, dim=self.dim + by)

    @property
    def place(self) -> tuple[int, int, int]:
        return self.dim, self.outer, self.inner


@dataclass(frozen=True, slots=True)
class Partial:
    """Made inside loop `phase`: pieces' values, combined, are the value.

    Attributes:
      reducer: "sum", "max", "min", "prod", "and" or "or".
      phase, cheap: as of `RowsState`.
    """

    reducer: str
    phase: int = 0
    cheap: int | None = None


State = WholeState | RowsState | Partial


def is_outside(state: State) -> bool:
    """Whether a value is made outside of loops."""
    return isinstance(state, WholeState) and not state.is_inside


def is_there(state: State, use: State) -> bool:
    """Whether a loop that makes a value in one state has it in another.

    Else the value is needed in full, or comes from outside.
    """
    if isinstance(state, WholeState):
        return state.is_inside and (not isinstance(use, WholeState) or state == use)
    if isinstance(state, RowsState):
        return isinstance(use, RowsState) and state.place == use.place
    return isinstance(use, Partial) or use.is_own


def known_after(state: State) -> int:
    """How many loops run before a value is known in full."""
    if isinstance(state, WholeState):
        return state.phase + state.is_inside
    return state.phase + 1 if state.cheap is None else state.cheap


def inside(state: State) -> State:
    """The same as a region sees it, which runs inside a loop."""
    if isinstance(state, WholeState):
        return WholeState(is_zero=state.is_zero, is_own=state.is_own)
    return replace(state, phase=0, cheap=None)


def is_own(state: State) -> bool:
    """Whether pieces have something of their own for a value."""
    return isinstance(state, WholeState) and state.is_own


@dataclass(frozen=True, slots=True)
class Spot:
    """The batch inside a factor of an op: (outer, rows, inner) of it."""

    factor: int
    outer: int
    inner: int


def locate(rule: Rule, layout: Layout, cut: RowsState, rows: int) -> Spot | None:
    """The factor that holds the batch of a cut dim; None where none does alone."""
    sizes = [rule.factors[f].size for f in layout[cut.dim]]
    major, total = 1, math.prod(sizes)
    for f, size in zip(layout[cut.dim], sizes, strict=True):
        minor = total // (major * size)
        if not cut.outer % major and not cut.inner % minor:
            spot = Spot(f, cut.outer // major, cut.inner // minor)
            if spot.outer * rows * spot.inner == size:
                return spot
        major *= size
    return None


def placed(rule: Rule, layout: Layout, spot: Spot) -> RowsState | None:
    """The dim of an operand or result that holds a factor, cut there."""
    for d, dim in enumerate(layout):
        if spot.factor not in dim:
            continue
        at = dim.index(spot.factor)
        major = math.prod(rule.factors[f].size for f in dim[:at])
        minor = math.prod(rule.factors[f].size for f in dim[at + 1 :])
        return RowsState(d, major * spot.outer, spot.inner * minor)
    return None


def is_free(rule: Rule, factor: int) -> bool:
    """Whether pieces of a factor need nothing of one another."""
    return rule.factors[factor].kind in (FactorKind.PARALLEL, FactorKind.REDUCE)
