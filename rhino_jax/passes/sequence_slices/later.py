"""Token pairs whose column is after their row: masks, and results of ops on pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.op import Op
from rhino_jax.ir.traits import OpKind, Traits
from rhino_jax.passes.sequence_slices.bounds import MODERATE, Bounds
from rhino_jax.passes.sequence_slices.states import Fill, Later, Seen


LOW = -5 * MODERATE
"""Upper bound of values that add nothing to a softmax.

Added to a moderate score, their exponential is zero in float32, as that of -104 is.
Half of -1e4, the smallest magnitude that masks add in float16 (whose least number is
-65,504), so that it is still low when a score is added.
"""


@dataclass(frozen=True, eq=False)
class Corner:
    """Bounds of a whole value by row and column.

    Attributes:
      low, high: [rows, columns], or views of that.
      is_after: [rows, columns], whether the column is after the row.
    """

    low: Any
    high: Any
    is_after: Any

    @cached_property
    def later(self) -> Later:
        """Facts about the pairs, where the value is an operand of an op."""
        least = np.min(self.low, initial=np.inf, where=self.is_after)
        most = np.max(self.high, initial=-np.inf, where=self.is_after)
        seen = self.seen(self.low >= -MODERATE)
        if least == most == 0:
            return Later(Fill.ZERO, seen=seen)
        return low(float(most), seen, may_be_low=bool(least < -MODERATE))

    @property
    def is_moderate(self) -> Any:
        """[rows, columns], whether elements are surely as moderate as activations."""
        return (self.low >= -MODERATE) & (self.high <= MODERATE)

    @property
    def is_never(self) -> bool:
        """Whether no boolean can be true in a later column."""
        return not np.any(self.high.astype(bool) & self.is_after)

    @property
    def is_always(self) -> bool:
        return bool(np.all(self.low.astype(bool) | ~self.is_after))

    def seen(self, surely: Any) -> Seen:
        """Return how many columns up to the row are surely seen.

        Args:
          surely: [rows, columns], whether the column is surely seen.
        """
        if np.all(surely | self.is_after):
            return Seen.ALL
        any_in_row = np.any(surely & ~self.is_after, axis=1)
        return Seen.ONE if np.all(any_in_row) else Seen.NONE

    @property
    def leak(self) -> str:
        """A later column that may be seen, in words."""
        may_be = self.high.astype(bool) & self.is_after
        if not np.any(may_be):
            return ""
        row, column = np.unravel_index(int(np.argmax(may_be)), may_be.shape)
        return f"token {row} may see token {column}"


def low(most: float, seen: Seen, *, may_be_low: bool = True) -> Later:
    """Return facts about later pairs with an upper bound: low, if it is low enough.

    Args:
      most: the upper bound.
      seen: how many of the other columns are surely not low.
      may_be_low: whether some may be low where not all are.
    """
    if most <= LOW:
        return Later(Fill.LOW, most, seen, may_be_low=True)
    return Later(seen=seen, may_be_low=may_be_low, may_be_high=not most <= MODERATE)


def corner_of(
    bounds: Bounds | None,
    dims: tuple[int | None, int | None],
    row: AxisSpan,
    column: AxisSpan,
) -> Corner | None:
    """Return bounds by row and column; None where nothing is known.

    Args:
      bounds: of a whole value.
      dims: its dims of rows and of columns; None: it is the same for all of them.
      row, column: which tokens of the sequence these dims hold.
    """
    if bounds is None:
        return None
    columns = np.arange(column.first, column.first + column.size)
    rows = np.arange(row.first, row.first + row.size)
    after = columns > rows.reshape(-1, 1)

    def by_pair(x: Any, reduce: Any) -> Any:
        x = reduce(x, axis=tuple(d for d in range(x.ndim) if d not in dims))
        first, second = dims
        if first is not None and second is not None and first > second:
            x = x.T
        if first is None or second is None:
            x = x.reshape(1 if first is None else -1, 1 if second is None else -1)
        return np.broadcast_to(x, after.shape)

    return Corner(by_pair(bounds.low, np.min), by_pair(bounds.high, np.max), after)


@dataclass(frozen=True, slots=True)
class PairOperand:
    """An operand of an op on pairs.

    Attributes:
      later: what is known of its pairs.
      least, most: bounds of all its elements; infinite where they are not known.
      corner: bounds of a whole value, by row and column; None of other values.
    """

    later: Later
    least: float = -math.inf
    most: float = math.inf
    corner: Corner | None = None


ZERO = Later(Fill.ZERO)


def made_by(op: Op, parts: Sequence[PairOperand]) -> Later:
    """Return what is known of pairs that an elementwise or linear op computes.

    Args:
      op: the op.
      parts: its operands.
    """
    traits = op.traits
    if len(parts) == 1 and _keeps_elements(traits):
        return parts[0].later
    if traits.is_choice:
        return _chosen(parts)
    if traits.compares:
        return _compared(traits.compares, *parts)
    if traits.limit == 0.0 and _is_low(parts[0]):
        return ZERO
    if traits.keeps_zeros([_is_zero(part) for part in parts]):
        return ZERO
    rule = _RULES.get((traits.reducer, len(traits.accumulates)))
    if op.name == "div":
        rule = _div
    found = rule(*parts) if traits.is_elementwise and rule is not None else None
    return _plain(parts) if found is None else found


def _keeps_elements(traits: Traits) -> bool:
    """Whether results are elements of the operand, or the largest along another dim."""
    if traits.kind is OpKind.REDUCTION:
        return traits.reducer == "max"
    kinds = OpKind.CONVERSION, OpKind.IDENTITY
    return bool(traits.moves) or traits.kind in kinds


def _plain(parts: Sequence[PairOperand]) -> Later:
    """Return what is known where nothing is known of later columns."""
    found = either(p.later for p in parts)
    # Known high values do not count: numbers of elements are as high as masked ones.
    extreme = found.may_be_low or any(
        p.later.may_be_high and not math.isfinite(p.most) for p in parts
    )
    return replace(found, may_be_low=extreme, may_be_high=extreme)


def either(parts: Iterable[Later]) -> Later:
    """Return what is known of a choice among pairs, or of their sum."""
    found = tuple(parts)
    return Later(
        seen=min(later.seen for later in found),
        leak=next((later.leak for later in found if later.leak), ""),
        may_be_low=any(later.may_be_low for later in found),
        may_be_high=any(later.may_be_high for later in found),
    )


def _is_zero(part: PairOperand) -> bool:
    return part.later.fill is Fill.ZERO


def _is_low(part: PairOperand) -> bool:
    return part.later.fill is Fill.LOW


def _least(part: PairOperand) -> float:
    """Return a lower bound in later columns; those of weights are moderate."""
    if math.isfinite(part.least):
        return part.least
    return -math.inf if part.later.may_be_low else -MODERATE


def _most(part: PairOperand) -> float:
    """Return an upper bound in later columns; those of weights are moderate."""
    if _is_low(part):
        return part.later.most
    if math.isfinite(part.most):
        return part.most
    return math.inf if part.later.may_be_high else MODERATE


def _chosen(parts: Sequence[PairOperand]) -> Later:
    """Return the rule of `select_n(which, no, yes)`."""
    which, *cases = parts
    if all(map(_is_zero, cases)):
        return ZERO
    if len(cases) != 2 or which.corner is None:
        return _chosen_by_pairs(which, cases)
    no, yes = cases
    mask = which.corner
    may_be = ~mask.low.astype(bool), mask.high.astype(bool)
    if mask.is_never:
        found = no.later
    elif mask.is_always:
        found = yes.later
    elif _is_low(no) and _is_low(yes):
        found = low(max(no.later.most, yes.later.most), Seen.NONE)
    else:
        chosen = [
            case.later
            for case, at in zip(cases, may_be, strict=True)
            if np.any(at & mask.is_after)
        ]
        found = replace(either(chosen), leak="")
    leak = found.leak or (mask.leak if found.fill is Fill.ANY else "")
    return replace(found, seen=_seen(mask, cases, may_be), leak=leak)


def _seen(mask: Corner, cases: Sequence[PairOperand], may_be: Sequence[Any]) -> Seen:
    """Return how many columns up to a row surely choose moderate values.

    Args:
      mask: the predicate.
      cases: values for False and True.
      may_be: for each case, [rows, columns], whether it may be chosen.
    """
    dark = np.zeros(mask.is_after.shape, bool)
    for i, (case, at) in enumerate(zip(cases, may_be, strict=True)):
        if case.corner is not None:
            dark |= at & ~case.corner.is_moderate
        elif case.later.seen is not Seen.ALL:
            if not np.any(may_be[1 - i] & ~mask.is_after):
                return case.later.seen  # all columns choose this case
            dark |= at
    return mask.seen(~dark)


def _chosen_by_pairs(which: PairOperand, cases: Sequence[PairOperand]) -> Later:
    """Return the rule of a choice by rows, or pair by pair."""
    is_clear = all(c.later.seen is Seen.ALL for c in cases)
    seen = Seen.ALL if is_clear else Seen.NONE
    if len(cases) == 2 and _is_zero(which):
        return replace(cases[0].later, seen=seen)
    if all(map(_is_low, cases)):
        return low(max(c.later.most for c in cases), seen)
    return replace(either(c.later for c in cases), seen=seen)


def _both_seen(a: PairOperand, b: PairOperand) -> Seen:
    """Return how many columns are seen in a sum.

    One column that is seen in either operand may not be the same one.
    """
    if Seen.ALL in (a.later.seen, b.later.seen):
        return min(a.later.seen, b.later.seen)
    return Seen.NONE


def _add(a: PairOperand, b: PairOperand) -> Later:
    seen = _both_seen(a, b)
    if _is_low(a) or _is_low(b):
        return low(_most(a) + _most(b), seen)
    return replace(either((a.later, b.later)), seen=seen)


def _not_high(part: PairOperand) -> Seen:
    """Return how many columns up to a row are surely not high in a known operand."""
    if part.corner is not None:
        return part.corner.seen(part.corner.high <= MODERATE)
    return Seen.NONE if MODERATE < part.most < math.inf else Seen.ALL


def _sub(a: PairOperand, b: PairOperand) -> Later:
    seen = min(_both_seen(a, b), _not_high(b))
    if _is_low(a):
        return low(a.later.most - _least(b), seen)
    x, y = a.later, b.later
    return replace(
        _plain((a, b)),
        seen=seen,
        may_be_low=x.may_be_low or y.may_be_high,
        may_be_high=x.may_be_high or y.may_be_low,
    )


def _mul(a: PairOperand, b: PairOperand) -> Later | None:
    for x, by in ((a, b), (b, a)):
        if _is_low(x) and 0 < by.least <= by.most <= MODERATE:
            return low(x.later.most * by.least, x.later.seen)
    return None


def _div(a: PairOperand, b: PairOperand) -> Later | None:
    if _is_low(a) and 1 / MODERATE <= b.least <= b.most < math.inf:
        return low(a.later.most / b.most, a.later.seen)
    return None


def _max(a: PairOperand, b: PairOperand) -> Later | None:
    if _is_low(a) and _is_low(b):
        return low(max(a.later.most, b.later.most), max(a.later.seen, b.later.seen))
    if (_is_low(a) and _is_zero(b)) or (_is_zero(a) and _is_low(b)):
        return ZERO
    return None


def _compared(how: str, a: PairOperand, b: PairOperand) -> Later:
    """Return the rule of comparisons: False where one operand is surely larger."""
    is_false = (how in (">", ">=", "==") and _above(a, b)) or (
        how in ("<", "<=", "==") and _above(b, a)
    )
    return ZERO if is_false else _plain((a, b))


def _above(a: PairOperand, b: PairOperand) -> bool:
    """Whether `b` is surely larger in all later columns."""
    return _is_low(a) and a.later.most < _least(b)


_RULES: Mapping[tuple[str, int], Callable[[PairOperand, PairOperand], Later | None]] = {
    ("sum", 2): _add,
    ("sum", 1): _sub,
    ("prod", 2): _mul,
    ("max", 2): _max,
}
"""Reducer, and number of operands that it accumulates to → rule."""
