"""Masks, evaluated in NumPy on the positions of tokens.

What depends on constants, positions and data alone is computed; where data are unknown,
for their lowest and highest values. Dims along which nothing differs have size one, so
that a mask that is broadcast to all heads is as small as it was. Scores of token pairs
are evaluated at five places, see `PLACES`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rhino_jax._compat import bind_eqn
from rhino_jax.frontend.known_values import FOLDS, Fold
from rhino_jax.frontend.registry import traits_of
from rhino_jax.ir.axes import AxisSpan, FactorSpan
from rhino_jax.ir.op import Op
from rhino_jax.ir.traits import OpKind, Traits


MODERATE = 1e3
"""Assumed largest magnitude of floats that depend on weights or activations.

What masks add to attention scores is not counted. (A score of 100 is a probability of
1.)
"""

LOW = -5 * MODERATE
"""Upper bound of values that add nothing to a softmax.

Added to a moderate score, their exponential is zero in float32, as that of -104 is.
Half of -1e4, the smallest magnitude that masks add in float16 (whose least number is
-65,504), so that it is still low when a score is added.
"""

MAX_ELEMENTS = 1 << 27
"""Largest number of elements of bounds.

That is a mask of 11,585 tokens squared, 128 MiB of booleans.
"""

MAX_EVALUATED = 1 << 20
"""Largest number of elements of arrays that JAX computes, where NumPy has no rule."""

PLACES = 5
"""Number of places of token pairs: the first token is before the second; after it; the
same; the second token is at position 0; the first one is."""

SAME, AT_ZERO = 2, 3
"""Places: both tokens are the same; the first of those with one at position 0."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """Lower and upper bounds of a value's elements.

    Attributes:
      low, high: [.., size or 1, ..], or of token pairs [places]; the same array where
        elements are known.
      is_assumed: whether they hold only for weights and activations within `MODERATE`.
      mask: of token pairs, [first, second], which pairs a mask may let through; None:
        there is no mask.
      seen: cache of bounds by place.
    """

    low: Any
    high: Any
    is_assumed: bool = False
    mask: Any = None
    seen: dict[Any, Bounds] = field(default_factory=dict, repr=False)

    @property
    def is_exact(self) -> bool:
        return self.low is self.high

    @property
    def is_zero(self) -> Any:
        """Elements that are surely zero, or False, as booleans."""
        return (self.low == 0) & (self.high == 0)

    def is_extreme(self, is_added: bool) -> Any:
        """Return which elements may be lower than any value of weights, or higher, if
        they are added or chosen: numbers of elements, by which means divide, are as
        high."""
        return ~(self.low >= -MODERATE) | (~(self.high <= MODERATE) & is_added)

    def turned(self) -> Bounds:
        """Return the bounds of token pairs with the first token for the second."""
        low, high = (x[[1, 0, 2, 4, 3]] for x in (self.low, self.high))
        return Bounds(low, high, mask=None if self.mask is None else self.mask.T)

    def leak(self, row: int) -> str:
        """Return which later column a mask lets through, in words; empty: none.

        Args:
          row: the dim of token pairs that has the rows.
        """
        if self.mask is None:
            return ""
        later = np.argwhere(np.triu(self.mask.T if row else self.mask, 1)).tolist()
        return "".join(f": token {at} may see token {of}" for at, of in later[:1])

    def at_places(
        self, spans: Sequence[AxisSpan | None], tokens: Sequence[FactorSpan]
    ) -> Bounds:
        """Return the bounds of a value at the places of token pairs.

        Args:
          spans: its dims of the first and of the second token; None: it is the same for
            all of them.
          tokens: which tokens of the sequence these are.
        """
        is_plain = all(span is None or span.is_plain for span in spans)
        if not is_plain or self.low.size == self.high.size == 1:
            return uniform(float(np.min(self.low)), float(np.max(self.high)))
        key = (*spans, *tokens)
        if key not in self.seen:
            a, b = np.ix_(*(np.arange(t.first, t.first + t.size) for t in tokens))
            places = a < b, a > b, a == b, b == 0, a == 0
            dims = [s.dim if s else self.low.ndim + k for k, s in enumerate(spans)]

            def pairs(x: Any, reduce: Callable[..., Any]) -> Any:
                x = np.moveaxis(x.reshape(*x.shape, 1, 1), dims, (-2, -1))
                x = reduce(x, tuple(range(x.ndim - 2))).astype(np.float32)
                return np.broadcast_to(x, places[SAME].shape)

            low, high = pairs(self.low, np.min), pairs(self.high, np.max)
            is_mask = self.low.dtype == np.bool_ and not any(t.first for t in tokens)
            self.seen[key] = Bounds(
                np.array([np.min(low, initial=np.inf, where=p) for p in places]),
                np.array([np.max(high, initial=-np.inf, where=p) for p in places]),
                mask=high != 0 if is_mask else None,
            )
        return self.seen[key]


def exactly(x: Any) -> Bounds | None:
    """Return the bounds of a constant; None if it is not fully on this machine."""
    dtype = getattr(x, "dtype", np.dtype(type(x)))
    is_here = getattr(x, "is_fully_addressable", True)
    if not _is_number(dtype) or not is_here or np.size(x) > MAX_ELEMENTS:
        return None
    array = _cast(np.asarray(x), dtype)
    return Bounds(array, array)


def _cast(array: Any, dtype: Any) -> Any:
    """Round an array to a type; floats of any type are then of one that NumPy has."""
    array = array.astype(dtype)
    return array.astype(np.float32) if _is_float(dtype) else array


def uniform(low: float, high: float) -> Bounds:
    """Return bounds that are the same for all token pairs."""
    return Bounds(np.full(PLACES, low), np.full(PLACES, high))


def evaluated(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    """Return the bounds of an equation's result; None where nothing is known.

    Args:
      eqn: the equation.
      operands: bounds of its operands.
    """
    made = [getattr(v.aval, "dtype", None) for v in eqn.outvars]
    if len(made) != 1 or not _is_number(made[0]):
        return None
    (dtype,), is_exact = made, all(b and b.is_exact for b in operands)
    is_added = _is_float(dtype) and adds(traits_of(eqn.primitive.name))
    known, has_any, found = list[Bounds | None](), is_exact, None
    for v, bounds in zip(eqn.invars, operands, strict=True):
        ones = np.ones((1,) * len(getattr(v.aval, "shape", ())), np.float32)
        if bounds is None and v.aval.dtype == np.bool_:
            bounds = Bounds(ones == 0, ones == 1)
        has_any |= bounds is not None
        if bounds is None and is_added and _is_float(v.aval.dtype):
            bounds = Bounds(-MODERATE * ones, MODERATE * ones, is_assumed=True)
        known.append(bounds)
    with np.errstate(all="ignore"):
        if has_any:
            found = bounded(eqn, known)
        if found is None and is_exact and eqn.invars:
            found = _run(eqn, known)
    if found is None or max(found.low.size, found.high.size) > MAX_ELEMENTS:
        return None
    low, high = (_cast(x, dtype) for x in (found.low, found.high))
    if _is_float(dtype):  # a compiler may round later, or not at all
        low = np.minimum(low, found.low, dtype=low.dtype)
        high = np.maximum(high, found.high, dtype=low.dtype)
        if np.isnan(low).any() or np.isnan(high).any():
            return None
    high = low if np.array_equal(low, high) else high
    return Bounds(low, high, found.is_assumed)


MODEST, EXTREME = uniform(-MODERATE, MODERATE), uniform(-np.inf, np.inf)
"""Bounds of rows; the second of those that may contain what masks add or subtract."""


def adds(traits: Traits) -> bool:
    """Whether an op adds, or chooses, elements of its operands."""
    is_sum = traits.is_elementwise and traits.reducer == "sum"
    return traits.is_choice or is_sum


def bounded(eqn: Any, operands: Sequence[Bounds | None]) -> Bounds | None:
    """Return the least and largest results at the bounds of operands.

    None where these do not bound the result, as it is not monotone in each operand.
    """
    name, made = eqn.primitive.name, eqn.outvars[0].aval.dtype
    traits, known = traits_of(name), [b for b in operands if b is not None]
    if len(known) < len(operands) or len(known) > 3:
        return None
    is_assumed = any(b.is_assumed for b in known)
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    how = traits.compares
    if name == "convert_element_type" and made == np.bool_:
        zero = np.zeros((1,) * len(shapes[0]))
        how, known = "!=", [*known, Bounds(zero, zero)]
    if how:
        return None if is_assumed else _compared(how, *map(_rounded, known))
    if made != np.bool_ and not _is_float(made):
        is_cut = bool(known) and _is_float(eqn.invars[0].aval.dtype)
        if is_cut or name in ("and", "or", "xor", "not", "div"):
            return None
    if name == "div" and not np.all(known[1].low > 0):
        return None
    wide = [[size for size in shape if size != 1] for shape in shapes]
    if name in _COPIES and np.prod(shapes[-1]) > MAX_ELEMENTS and wide[0] != wide[-1]:
        return None
    fold = _FUNCTIONS.get(name)
    if fold is None:
        return None

    def compute(*arrays: Any) -> Any:
        if traits.kind is not OpKind.ELEMENTWISE:
            arrays = tuple(map(np.broadcast_to, arrays, shapes))
        x = fold(eqn, arrays)
        # Dims along which nothing differs have no stride.
        return x[tuple(slice(None if step else 1) for step in x.strides)]

    # Monotone in each operand, it is least and largest at their bounds.
    ends = [(b.low,) if b.is_exact else (b.low, b.high) for b in known]
    found = list(itertools.starmap(compute, itertools.product(*ends)))
    low, high = (functools.reduce(f, found) for f in (np.minimum, np.maximum))
    return Bounds(low, high, is_assumed)


def _compared(how: str, a: Bounds, b: Bounds) -> Bounds:
    """Return where a comparison surely holds, and where it may hold."""
    if how in (">", ">="):
        a, b = b, a
    if how in ("<", ">"):
        return Bounds(a.high < b.low, a.low < b.high)
    low, high = a.high <= b.low, a.low <= b.high
    if how in ("==", "!="):
        low, high = low & (b.high <= a.low), high & (b.low <= a.high)
    return Bounds(~high, ~low) if how == "!=" else Bounds(low, high)


def _rounded(bounds: Bounds) -> Bounds:
    """Widen the bounds of fractions by what a compiler may round otherwise.

    That is a few units in the last place.
    """
    low, high = (np.asarray(x, float) for x in (bounds.low, bounds.high))
    if all(np.all((x == np.rint(x)) | ~np.isfinite(x)) for x in (low, high)):
        return bounds
    return Bounds(low - 1e-5 * np.abs(low), high + 1e-5 * np.abs(high))


def _run(eqn: Any, operands: Sequence[Any]) -> Bounds | None:
    """Compute an equation on known operands in JAX."""
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    is_large = any(np.prod(aval.shape) > MAX_EVALUATED for aval in avals)
    if is_large or any(hasattr(x, "jaxpr") for x in eqn.params.values()):
        return None
    pairs = zip(avals, operands, strict=False)
    arrays = [np.broadcast_to(b.low, a.shape).astype(a.dtype) for a, b in pairs]
    return exactly(bind_eqn(eqn, arrays, eqn.params)[0])


def _is_number(dtype: Any) -> bool:
    """Whether elements are booleans, integers or floats."""
    is_dtype = isinstance(dtype, np.dtype)
    return is_dtype and (dtype.kind in "bui" or _is_float(dtype))


def _is_float(dtype: Any) -> bool:
    return "float" in str(dtype)


def _iota(eqn: Any, arrays: Sequence[Any]) -> Any:
    shape, d = eqn.params["shape"], eqn.params["dimension"]
    return np.broadcast_to(np.indices(shape, sparse=True)[d], shape)


def _broadcast(eqn: Any, arrays: Sequence[Any]) -> Any:
    shape, dims = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    new = [d for d in range(len(shape)) if d not in dims]
    return np.broadcast_to(np.expand_dims(arrays[0], new), shape)


def _slice(eqn: Any, arrays: Sequence[Any]) -> Any:
    starts, stops, steps = (eqn.params[k] for k in _RANGES)
    return arrays[0][tuple(map(slice, starts, stops, steps or [1] * len(starts)))]


def _of(ufunc: Callable[..., Any]) -> Fold:
    return lambda eqn, arrays: ufunc(*arrays)


_RANGES = "start_indices", "limit_indices", "strides"

_COPIES = "reshape", "concatenate"

_FUNCTIONS: Mapping[str, Fold] = {
    **FOLDS,
    "add_any": _of(np.add),
    "and": _of(np.bitwise_and),
    "div": _of(np.divide),
    "neg": _of(np.negative),
    "not": _of(np.invert),
    "or": _of(np.bitwise_or),
    "xor": _of(np.bitwise_xor),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda eqn, xs: np.concatenate(xs, eqn.params["dimension"]),
    "iota": _iota,
    "select_n": lambda eqn, xs: np.where(xs[0], xs[2], xs[1]),
    "sharding_constraint": FOLDS["copy"],
    "slice": _slice,
    "transpose": lambda eqn, xs: xs[0].transpose(eqn.params["permutation"]),
}
"""Primitive → what it computes."""


def of_pairs(
    op: Op, eqn: Any, operands: Sequence[Bounds], is_known: Sequence[bool]
) -> Bounds:
    """Return the bounds of the token pairs that an op computes, by place.

    What depends on weights or activations is moderate, unless an operand is not.

    Args:
      op, eqn: the op.
      operands: bounds of its operands, by place.
      is_known: for every operand, whether it depends on constants and data alone.
    """
    traits, is_bool = op.traits, eqn.outvars[0].aval.dtype == np.bool_
    is_same = traits.kind in (OpKind.CONVERSION, OpKind.IDENTITY) and not is_bool
    is_largest = traits.kind is OpKind.REDUCTION and traits.reducer == "max"
    if len(operands) == 1 and (traits.moves or is_same or is_largest):
        return operands[0]
    is_wide = np.zeros(PLACES, bool)
    for b, known in zip(operands, is_known, strict=True):
        is_wide |= b.is_extreme(adds(traits) or not known) & (not traits.is_bounded)
    most = np.where(is_wide, np.inf, MODERATE)
    low, high = (np.zeros(PLACES), np.ones(PLACES)) if is_bool else (-most, most)
    parts = [
        b if v.aval.dtype != np.bool_ else Bounds(b.low != 0, b.high != 0)
        for v, b in zip(eqn.invars, operands, strict=True)
    ]
    with np.errstate(all="ignore"):
        found = bounded(eqn, parts) if traits.is_elementwise else None
    if found is not None:
        low, high = np.fmax(found.low, low), np.fmin(found.high, high)
    is_zero = [
        traits.keeps_zeros(zeros)
        for zeros in zip(*(b.is_zero for b in operands), strict=True)
    ]
    is_low = (operands[0].high <= LOW) & (traits.limit is not None)
    fixed = np.where(is_zero, 0.0, traits.limit or 0.0)
    low, high = (np.where(is_low | is_zero, fixed, x) for x in (low, high))
    # Of a choice, the cases first.
    masks = [b.mask for b in (*operands[1:], operands[0]) if b.mask is not None]
    return Bounds(low, high, mask=next(iter(masks), None))
