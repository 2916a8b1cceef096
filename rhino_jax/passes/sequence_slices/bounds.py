"""Interval analysis: bounds of elements of values that depend on constants and data.

Those are masks, mostly. Bounds are NumPy arrays in which dims along which nothing
differs have size one, so that a mask that is broadcast to all heads is as small as it
was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from rhino_jax._compat import bind_eqn


MODERATE = 1e3
"""Assumed largest magnitude of floats that depend on weights or activations.

What masks add to attention scores is not counted. (A score of 100 is a probability of
1.)
"""


@dataclass(frozen=True, eq=False)
class Bounds:
    """Lower and upper bounds of a value's elements.

    Attributes:
      low, high: [.., size or 1, ..]; the same array where elements are known.
      is_assumed: whether they hold only for weights and activations within `MODERATE`.
    """

    low: Any
    high: Any
    is_assumed: bool = False

    @property
    def is_exact(self) -> bool:
        return self.low is self.high

    @cached_property
    def least(self) -> float:
        """A lower bound of all elements."""
        return float(np.min(self.low))

    @cached_property
    def most(self) -> float:
        """An upper bound of all elements."""
        return float(np.max(self.high))

    @cached_property
    def may_be_low(self) -> bool:
        """Whether some elements may be less than any value of weights."""
        return self.least < -MODERATE

    @cached_property
    def may_be_high(self) -> bool:
        """Whether some floats may be more than any value of weights."""
        return "float" in str(self.high.dtype) and self.most > MODERATE


def exactly(x: Any) -> Bounds:
    array = np.asarray(x)
    return Bounds(array, array)


def unknown(dtype: Any, rank: int) -> Bounds | None:
    """Return bounds of unknown elements: False to True, or None for numbers."""
    if dtype != np.bool_:
        return None
    ones = (1,) * rank
    return Bounds(np.zeros(ones, bool), np.ones(ones, bool))


MAX_ELEMENTS = 1 << 27
"""Largest number of elements of bounds.

That is a mask of 11,585 tokens squared, 128 MiB of booleans.
"""

MAX_EVALUATED = 1 << 20
"""Largest number of elements of arrays that are computed rather than bounded."""


def bounds_of(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    """Return the bounds of an equation's result; None where nothing is known.

    Args:
      eqn: the equation.
      operands: bounds of its operands.
    """
    if len(eqn.outvars) != 1:
        return None
    aval = eqn.outvars[0].aval
    if not is_number(getattr(aval, "dtype", None)):
        return None
    found = None
    rule = _RULES.get(eqn.primitive.name)
    if rule is not None:
        with np.errstate(all="ignore"):
            found = rule(eqn, operands)
    elif eqn.invars and all(b is not None and b.is_exact for b in operands):
        found = _evaluated(eqn, operands)
    if found is None or max(found.low.size, found.high.size) > MAX_ELEMENTS:
        return unknown(aval.dtype, len(aval.shape))
    if found.is_exact and np.issubdtype(aval.dtype, np.integer):
        return exactly(found.low.astype(aval.dtype))  # as narrow as there
    if not found.is_exact and np.isnan(found.low).any() | np.isnan(found.high).any():
        return None
    return found


@dataclass(slots=True)
class Masks:
    """Cache of bounds by value numbering.

    Equal equations on the same operands have the same bounds, so that the mask of every
    layer is analysed once.

    Attributes:
      found: (equation, operands) → bounds of its result.
    """

    found: dict[Any, Bounds | None] = field(default_factory=dict)

    def literal(self, x: Any) -> Bounds:
        """Return the bounds of a literal."""
        array = np.asarray(x)
        key = str(array.dtype), array.shape, array.tobytes()
        return cast(Bounds, self._known(key, lambda: exactly(array)))

    def of(self, eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
        """Return the bounds of an equation's result; see `bounds_of`."""
        if any(hasattr(x, "jaxpr") for x in eqn.params.values()):
            return bounds_of(eqn, operands)
        types = tuple(str(v.aval) for v in (*eqn.outvars, *eqn.invars))
        # Bounds are compared by identity.
        key = eqn.primitive.name, str(eqn.params), types, *operands
        return self._known(key, lambda: bounds_of(eqn, operands))

    def _known(self, key: Any, make: Callable[[], Bounds | None]) -> Bounds | None:
        if key not in self.found:
            self.found[key] = make()
        return self.found[key]


def is_number(dtype: Any) -> bool:
    """Whether elements are booleans, integers or floats."""
    if not isinstance(dtype, np.dtype):
        return False
    return dtype.kind in "bui" or _is_float(dtype)


def _is_float(dtype: Any) -> bool:
    return "float" in str(dtype)


def _wide(x: Any) -> Any:
    """Convert an array to a type that NumPy compares."""
    return x.astype(np.float32) if "bfloat16" in str(x.dtype) else x


def _evaluated(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    shapes = [tuple(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
    if any(np.prod(shape) > MAX_EVALUATED for shape in shapes):
        return None
    arrays = [
        np.broadcast_to(b.low, v.aval.shape).astype(v.aval.dtype)
        for v, b in zip(eqn.invars, operands, strict=True)
        if b is not None
    ]
    if any(hasattr(x, "jaxpr") for x in eqn.params.values()):
        return None
    (result,) = bind_eqn(eqn, arrays, eqn.params)
    return exactly(_wide(np.asarray(result)))


def _each(bounds: Bounds, fn: Callable[[Any], Any]) -> Bounds:
    low = fn(bounds.low)
    high = low if bounds.is_exact else fn(bounds.high)
    return Bounds(low, high, bounds.is_assumed)


def _iota(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    ones = [size if d == dim else 1 for d, size in enumerate(shape)]
    dtype = np.float32 if _is_float(eqn.params["dtype"]) else eqn.params["dtype"]
    return exactly(np.arange(shape[dim], dtype=dtype).reshape(ones))


def _broadcast(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    (bounds, *_) = operands
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]

    def placed(x: Any) -> Any:
        sizes = [1] * len(shape)
        for d, size in zip(dims, x.shape, strict=True):
            sizes[d] = size
        return x.reshape(sizes)

    return None if bounds is None else _each(bounds, placed)


def _reshape(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    bounds = operands[0]
    if bounds is None:
        return None
    if [s for s in before if s != 1] == [s for s in after if s != 1]:
        wide = [d for d, size in enumerate(before) if size != 1]

        def moved(x: Any) -> Any:
            sizes = iter([x.shape[d] for d in wide])
            return x.reshape([1 if size == 1 else next(sizes) for size in after])

        return _each(bounds, moved)
    if np.prod(before) > MAX_ELEMENTS:
        return None
    return _each(bounds, lambda x: np.broadcast_to(x, before).reshape(after))


def _transpose(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    order, (bounds,) = eqn.params["permutation"], operands
    return None if bounds is None else _each(bounds, lambda x: x.transpose(order))


def _slice(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    (bounds,) = operands
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(starts)

    def cut(x: Any) -> Any:
        return x[
            tuple(
                slice(None) if size == 1 else slice(a, b, c)
                for size, a, b, c in zip(x.shape, starts, stops, steps, strict=True)
            )
        ]

    return None if bounds is None else _each(bounds, cut)


def _same(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    return operands[0]


def _convert(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    (bounds,) = operands
    dtype = eqn.params["new_dtype"]
    if bounds is None:
        return None
    if dtype == np.bool_:
        if bounds.low.dtype == np.bool_:
            return bounds
        if bounds.is_exact:
            return exactly(bounds.low != 0)
        if bounds.is_assumed:
            return None
        low = (bounds.low > 0) | (bounds.high < 0)
        return Bounds(low, ~((bounds.low == 0) & (bounds.high == 0)))
    kind = np.float32 if _is_float(dtype) else dtype
    if not _is_float(dtype) and _is_float(bounds.low.dtype) and not bounds.is_exact:
        return None
    return _each(bounds, lambda x: x.astype(kind))


def _both(
    operands: Sequence[Bounds | None], fn: Callable[[Bounds, Bounds], Bounds]
) -> Bounds | None:
    a, b = operands
    if a is None or b is None:
        return None
    return replace(fn(a, b), is_assumed=a.is_assumed or b.is_assumed)


def _pairs(fn: Callable[[Any, Any], Any], turned: bool = False) -> Any:
    """Return the rule of an op that is monotone in both of its operands.

    Args:
      fn: the NumPy function, increasing in the first operand.
      turned: whether it decreases with the second, instead of increasing.
    """

    def rule(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
        def both(a: Bounds, b: Bounds) -> Bounds:
            low = fn(a.low, b.high if turned else b.low)
            if a.is_exact and b.is_exact:
                return Bounds(low, low)
            return Bounds(low, fn(a.high, b.low if turned else b.high))

        return _both(operands, both)

    return rule


def _added(fn: Callable[[Any, Any], Any], turned: bool = False) -> Any:
    """Return the rule of a sum or difference, in which an unknown float is moderate."""
    rule = _pairs(fn, turned)

    def of_floats(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
        if not _is_float(eqn.outvars[0].aval.dtype) or all(b is None for b in operands):
            found: Bounds | None = rule(eqn, operands)
            return found
        return rule(eqn, [_moderate() if b is None else b for b in operands])

    return of_floats


def _moderate() -> Bounds:
    return Bounds(np.float32(-MODERATE), np.float32(MODERATE), is_assumed=True)


def _mul(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    def both(a: Bounds, b: Bounds) -> Bounds:
        if a.is_exact and b.is_exact:
            return exactly(a.low * b.low)
        ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        low, high = ends[0], ends[0]
        for end in ends[1:]:
            low, high = np.minimum(low, end), np.maximum(high, end)
        return Bounds(low, high)

    return _both(operands, both)


def _neg(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    (bounds,) = operands
    if bounds is None:
        return None
    if bounds.is_exact:
        return exactly(-bounds.low)
    return Bounds(-bounds.high, -bounds.low, bounds.is_assumed)


def _logic(fn: Callable[[Any, Any], Any]) -> Any:
    rule = _pairs(fn)

    def of_booleans(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
        is_bool = eqn.outvars[0].aval.dtype == np.bool_
        exact = all(b is not None and b.is_exact for b in operands)
        found: Bounds | None = rule(eqn, operands) if is_bool or exact else None
        return found

    return of_booleans


def _not(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    (bounds,) = operands
    if bounds is None:
        return None
    if bounds.is_exact:
        return exactly(~bounds.low)
    if bounds.low.dtype != np.bool_:
        return None
    return Bounds(~bounds.high, ~bounds.low)


def _compared(name: str) -> Any:
    def rule(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
        if any(b is not None and b.is_assumed for b in operands):
            return None

        def both(a: Bounds, b: Bounds) -> Bounds:
            if not (a.is_exact and b.is_exact and _is_same_anywhere(a.low, b.low)):
                a, b = _rounded(a), _rounded(b)
            if name in ("gt", "ge"):
                a, b = b, a
            if name in ("lt", "gt"):
                low, high = a.high < b.low, a.low < b.high
            elif name in ("le", "ge"):
                low, high = a.high <= b.low, a.low <= b.high
            else:
                low = (a.low == b.high) & (a.high == b.low)
                high = (a.low <= b.high) & (b.low <= a.high)
                if name == "ne":
                    low, high = ~high, ~low
            if a.is_exact and b.is_exact and _is_same_anywhere(a.low, b.low):
                high = low
            return Bounds(low, high)

        return _both(operands, both)

    return rule


def _is_same_anywhere(a: Any, b: Any) -> bool:
    """Whether these compare in compilers as in NumPy: no floats but whole numbers."""
    return all(
        not _is_float(x.dtype) or not np.any(np.isfinite(x) & (x != np.rint(x)))
        for x in (a, b)
    )


def _rounded(bounds: Bounds) -> Bounds:
    """Widen the bounds by what a compiler may round otherwise.

    That is a few units in the last place.
    """
    if not _is_float(bounds.low.dtype):
        return bounds
    low, high = (np.asarray(x, np.float64) for x in (bounds.low, bounds.high))
    return Bounds(low - 1e-5 * np.abs(low), high + 1e-5 * np.abs(high))


def _select(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    which, *cases = operands
    if which is None or which.low.dtype != np.bool_ or len(cases) != 2:
        return None
    is_float = _is_float(eqn.outvars[0].aval.dtype)
    if all(c is None for c in cases) or (None in cases and not is_float):
        return None
    no, yes = (_moderate() if c is None else c for c in cases)
    if which.is_exact and no.is_exact and yes.is_exact:
        return exactly(_where(which.low, yes.low, no.low))
    low = _where(which.low, yes.low, np.minimum(yes.low, no.low))
    low = _where(which.high, low, no.low)
    high = _where(which.low, yes.high, np.maximum(yes.high, no.high))
    high = _where(which.high, high, no.high)
    return Bounds(low, high, no.is_assumed or yes.is_assumed)


def _where(which: Any, yes: Any, no: Any) -> Any:
    """`np.where`, a scalar predicate expanded to the rank of the cases."""
    found = np.where(which, yes, no)
    rank = max(np.ndim(yes), np.ndim(no))
    return found.reshape((1,) * (rank - found.ndim) + found.shape)


_RULES: Mapping[str, Callable[[Any, Sequence[Bounds | None]], Bounds | None]] = {
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "sharding_constraint"), _same),
    "convert_element_type": _convert,
    "add": _added(np.add),
    "sub": _added(np.subtract, turned=True),
    "max": _pairs(np.maximum),
    "min": _pairs(np.minimum),
    "mul": _mul,
    "neg": _neg,
    "and": _logic(np.bitwise_and),
    "or": _logic(np.bitwise_or),
    "not": _not,
    **{name: _compared(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "select_n": _select,
}
