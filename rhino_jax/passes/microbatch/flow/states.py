"""States of values in a loop over micro-batches, and positions of the batch in dims.

The batch is one factor of `rows` indices. A dim that holds it is the product (outer,
rows, inner), major first: dim 0 of `[B, S]` is (1, B, 1), the merged dim of `[B·S]` is
(1, B, S). A micro-batch has some of the rows, and of that dim (outer, its rows, inner).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rhino_jax.ir.factor import FactorKind, Layout, Rule


@dataclass(frozen=True, slots=True)
class WholeState:
    """A value that is known in full before loop `phase` runs.

    Attributes:
      phase: number of loops that run before the value is known.
      is_zero: whether every element is zero.
      is_inside: whether it is computed inside loop `phase`, equal in all micro-batches.
      is_own: whether it differs between micro-batches, as the user requested: each
        computes it from its own rows. Outside of the loop, the mean over micro-batches
        replaces it.
    """

    phase: int = 0
    is_zero: bool = False
    is_inside: bool = False
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class RowsState:
    """A value computed inside loop `phase`, of which each micro-batch has its rows.

    Attributes:
      dim: the dim that holds the batch.
      outer, inner: sizes of its major and minor factors next to the batch.
      phase: the first loop that can compute it.
      cheap: number of loops that run before it may be computed in full, cheaply,
        outside of loops; None: it is not cheap.
      is_own: whether an op reads these rows of a sum over the batch that each
        micro-batch computes from its own rows.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    phase: int = 0
    cheap: int | None = None
    is_own: bool = False

    def local(self, shape: Sequence[int], rows: int) -> tuple[int, ...]:
        """Return the shape of a micro-batch of the value.

        Args:
          shape: shape of the full value.
          rows: number of rows of the micro-batch.
        """
        size = self.outer * rows * self.inner
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def moved(self, by: int) -> RowsState:
        """Return the state with its dim shifted by `by` positions."""
        return replace(self, dim=self.dim + by)

    @property
    def place(self) -> tuple[int, int, int]:
        """Position of the batch: (dim, outer, inner)."""
        return self.dim, self.outer, self.inner


@dataclass(frozen=True, slots=True)
class Partial:
    """A value computed inside loop `phase` as a partial result of each micro-batch.

    Attributes:
      reducer: the reduction over micro-batches that yields the value: "sum", "max",
        "min", "prod", "and" or "or".
      phase, cheap: see `RowsState`.
    """

    reducer: str
    phase: int = 0
    cheap: int | None = None


State = WholeState | RowsState | Partial


def is_outside(state: State) -> bool:
    """Whether a value is computed outside of loops."""
    return isinstance(state, WholeState) and not state.is_inside


def is_there(state: State, use: State) -> bool:
    """Whether a loop that computes a value in one state has it in another.

    Otherwise the value is needed in full, or computed outside of the loop.

    Args:
      state: state of the value.
      use: state in which an op reads it.
    """
    if isinstance(state, WholeState):
        return state.is_inside and (not isinstance(use, WholeState) or state == use)
    if isinstance(state, RowsState):
        return isinstance(use, RowsState) and state.place == use.place
    return isinstance(use, Partial) or use.is_own


def known_after(state: State) -> int:
    """Return the number of loops that run before a value is known in full."""
    if isinstance(state, WholeState):
        return state.phase + state.is_inside
    return state.phase + 1 if state.cheap is None else state.cheap


def inside(state: State) -> State:
    """Return a state relative to a region that runs inside a loop."""
    if isinstance(state, WholeState):
        return WholeState(is_zero=state.is_zero, is_own=state.is_own)
    return replace(state, phase=0, cheap=None)


def is_own(state: State) -> bool:
    """Whether each micro-batch computes a value from its own rows."""
    return isinstance(state, WholeState) and state.is_own


@dataclass(frozen=True, slots=True)
class Spot:
    """Position of the batch inside a factor of an op, which is (outer, rows, inner)."""

    factor: int
    outer: int
    inner: int


def locate(rule: Rule, layout: Layout, cut: RowsState, rows: int) -> Spot | None:
    """Return the position of the batch in a factor of an op.

    Args:
      rule: factors of the op.
      layout: factors of each dim of an operand or result.
      cut: position of the batch in its dims.
      rows: size of the batch.
    Returns:
      None where no single factor holds the batch.
    """
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
    """Return the position of the batch in an operand or result from that in a factor.

    Args:
      rule: factors of the op.
      layout: factors of each dim of the operand or result.
      spot: position of the batch inside a factor.
    Returns:
      None where no dim has that factor.
    """
    for d, dim in enumerate(layout):
        if spot.factor not in dim:
            continue
        at = dim.index(spot.factor)
        major = math.prod(rule.factors[f].size for f in dim[:at])
        minor = math.prod(rule.factors[f].size for f in dim[at + 1 :])
        return RowsState(d, major * spot.outer, spot.inner * minor)
    return None


def is_free(rule: Rule, factor: int) -> bool:
    """Whether slices of a factor can be computed independently, up to a reduction."""
    return rule.factors[factor].kind in (FactorKind.PARALLEL, FactorKind.REDUCE)
