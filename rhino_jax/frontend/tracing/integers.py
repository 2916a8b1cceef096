"""Integers in steps: arrays whose elements grow evenly along each dim, such as row
numbers, and the indices of gathers and scatters that are made of them.

JAX numbers positions at run time: `x.at[::2]` has indices that are an iota, times two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rhino_jax._compat import is_literal, scan_counts
from rhino_jax.frontend.known_values import IDENTITIES, known_value
from rhino_jax.frontend.regions import entering, region_kind
from rhino_jax.ir.program import RegionKind


_MAX_COMPONENTS = 16
"""Maximum number of components of a constant index: one per dim of an array."""


@dataclass(frozen=True, slots=True)
class Line:
    """Integers `start + Σ steps[d] · i[d]` of an array, over its positions `i`."""

    start: int
    steps: tuple[int, ...]

    @property
    def is_constant(self) -> bool:
        return not any(self.steps)

    def times(self, factor: int) -> Line:
        return Line(self.start * factor, tuple(s * factor for s in self.steps))

    @property
    def along(self) -> int | None:
        """The dim along which every element is its own position; None without one."""
        found = [d for d, step in enumerate(self.steps) if step]
        is_own = len(found) == 1 and (self.start, self.steps[found[0]]) == (0, 1)
        return found[0] if is_own else None

    def span(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the least and the largest integer, of an array of a shape."""
        far = [step * (n - 1) for step, n in zip(self.steps, shape, strict=True)]
        low, high = (sum(pick(x, 0) for x in far) for pick in (min, max))
        return self.start + low, self.start + high


Columns = tuple[Line | None, ...]
"""The integers of each component of an index, over all dims but the last; None of those
that are not in steps."""


def _moved(found: Line | Columns, by: int) -> Line | Columns | None:
    """Return the same integers with a leading dim more (1), or less (-1); None where
    they differ along it."""
    if isinstance(found, tuple):
        each = tuple(line and _moved(line, by) for line in found)
        return each if any(each) else None  # type: ignore[return-value]
    if by < 0 and (not found.steps or found.steps[0]):
        return None
    return Line(found.start, (0, *found.steps) if by > 0 else found.steps[1:])


class Integers:
    """The integers in steps among the values of a jaxpr, as far as its equations were
    seen.

    Attributes:
      pieces: variable of an index → those that are concatenated to it.
    """

    def __init__(self, inputs: Mapping[Any, Line | Columns | None]) -> None:
        """Create a record for a jaxpr.

        Args:
          inputs: variable of the jaxpr → its integers; None where they are unknown.
        """
        self._found = {var: found for var, found in inputs.items() if found is not None}
        self.pieces: dict[Any, Sequence[Any]] = {}

    def of(self, atom: Any) -> Line | Columns | None:
        """Return the integers of a variable or literal."""
        if not is_literal(atom):
            return self._found.get(atom)
        value = known_value(atom, {})
        is_number = value is not None and not value.ndim and _has_integers(atom.aval)
        return Line(int(value), ()) if is_number else None  # type: ignore[arg-type]

    def columns(self, atom: Any) -> Columns:
        """Return the integers of each component of an index; empty where all are
        unknown."""
        found = self.of(atom)
        if not isinstance(found, Line):
            return found or ()
        *steps, last = found.steps or (0,)
        count = atom.aval.shape[-1] if atom.aval.shape else 0
        starts = (found.start + k * last for k in range(count))
        return tuple(Line(start, tuple(steps)) for start in starts)

    def see_const(self, var: Any, const: Any) -> None:
        """Record a captured NumPy array, as `np.arange(n)[:, None]`, or one index."""
        is_array = isinstance(const, np.ndarray) and const.dtype.kind in "iub"
        if not is_array or not const.size:
            return
        start = int(const.flat[0])
        steps = tuple(
            int(np.take(const, 1, d).flat[0]) - start if n > 1 else 0
            for d, n in enumerate(const.shape)
        )
        at = np.indices(const.shape, sparse=True)
        if (const == sum((s * x for s, x in zip(steps, at, strict=True)), start)).all():
            self._found[var] = Line(start, steps)
        elif const.ndim == 1 and const.size <= _MAX_COMPONENTS:
            self._found[var] = tuple(Line(n, ()) for n in const.tolist())

    def see(self, eqn: Any) -> None:
        """Record an equation's result, where it has integers in steps."""
        name = eqn.primitive.name
        found = [self.of(v) for v in eqn.invars]
        lines = [line if isinstance(line, Line) else None for line in found]
        if name in IDENTITIES and isinstance(found[0], tuple):
            self._found[eqn.outvars[0]] = found[0]
        elif name == "concatenate":
            (made,), sizes = eqn.outvars, {v.aval.shape[-1] for v in eqn.invars}
            is_last = eqn.params["dimension"] == made.aval.ndim - 1
            if is_last and sizes == {1} and any(lines):
                self._found[made] = tuple(
                    x and Line(x.start, x.steps[:-1]) for x in lines
                )
                self.pieces[made] = eqn.invars
        elif name in _FOLLOWED and (None not in lines or name == "select_n"):
            (made,), line = eqn.outvars, _followed(eqn, lines)
            if line is not None and _can_hold(made.aval, line):
                self._found[made] = line

    def inside(self, eqn: Any) -> list[Sequence[Line | Columns | None]]:
        """Return the integers of the first inputs of each sub-jaxpr of an equation."""
        found = [self.of(v) for v in eqn.invars]
        same = entering(eqn, found)
        if region_kind(eqn) is RegionKind.SCAN:
            num_consts, num_carry = scan_counts(eqn.params)
            slices = [x and _moved(x, -1) for x in found[num_consts + num_carry :]]
            same = [[*same[0], *[None] * num_carry, *slices]]
        return same

    def leave(self, eqn: Any, inner: Integers, results: Sequence[Any]) -> None:
        """Record the results of a call, or the stacks of a scan, given those of its
        sub-jaxpr and the results of that."""
        kind = region_kind(eqn)
        if kind not in (RegionKind.CALL, RegionKind.SCAN):
            return
        is_scan = kind is RegionKind.SCAN
        first = scan_counts(eqn.params)[1] if is_scan else 0
        for made, atom in zip(eqn.outvars[first:], results[first:], strict=True):
            found = inner.of(atom)
            found = _moved(found, 1) if found is not None and is_scan else found
            if found is not None:
                self._found[made] = found


def _has_integers(aval: Any) -> bool:
    """Whether values of a type are arrays of integers, and no PRNG keys."""
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and bool(np.issubdtype(dtype, np.integer))


def _can_hold(aval: Any, line: Line) -> bool:
    """Whether no element of an array of integers, or of comparisons, wraps around."""
    if not _has_integers(aval):
        return aval.dtype == np.bool_
    (low, high), info = line.span(aval.shape), np.iinfo(aval.dtype)
    return bool(info.min <= low and high <= info.max)


_SHAPED = frozenset({"reshape", "squeeze", "expand_dims"})

_FOLLOWED = (
    IDENTITIES
    | _SHAPED
    | {*"iota add sub max min mul broadcast_in_dim lt select_n".split()}
)


def _followed(eqn: Any, lines: Sequence[Any]) -> Line | None:
    """Return the integers that one of these primitives computes.

    Of maxima and minima, those of constants are followed; of comparisons, those that
    are never or always true: 0 or 1; of selections, those of one side alone, as of
    negative indices, which count from the end; of reshapes, those that add or remove
    dims of size one alone.
    """
    name, made, (first, *others) = eqn.primitive.name, eqn.outvars[0].aval, lines or [0]
    constant = (0,) * made.ndim
    if name in IDENTITIES:
        return first
    if name == "iota":
        own = eqn.params["dimension"]
        return Line(0, tuple(int(d == own) for d in range(made.ndim)))
    if name == "select_n":
        return others[first.start] if first is not None and first.is_constant else None
    if name in ("add", "sub"):
        both = (first, *(x.times(1 if name == "add" else -1) for x in others))
        steps = zip(*(x.steps or constant for x in both), strict=True)
        return Line(sum(x.start for x in both), tuple(map(sum, steps)))
    if name in ("max", "min"):
        starts = [x.start for x in lines if x.is_constant]
        pick = max if name == "max" else min
        return Line(pick(starts), constant) if len(starts) == len(lines) else None
    if name == "mul":
        a, b = sorted(lines, key=lambda line: line.is_constant)
        scaled = replace(a, steps=a.steps or b.steps).times(b.start)
        return scaled if b.is_constant else None
    old, new = eqn.invars[0].aval.shape, made.shape
    if name == "lt":
        pairs = zip(lines, eqn.invars, strict=True)
        (low, high), (least, most) = (x.span(v.aval.shape) for x, v in pairs)
        is_sure = high < least or low >= most
        return Line(int(high < least), constant) if is_sure else None
    if name == "broadcast_in_dim":
        dims = eqn.params["broadcast_dimensions"]
        moves = [(a, b) for a, b in enumerate(dims) if old[a] == new[b]]
    else:
        before, after = ([d for d, n in enumerate(x) if n != 1] for x in (old, new))
        if [old[d] for d in before] != [new[d] for d in after]:
            return None
        moves = [*zip(before, after, strict=True)]
    steps_of = {b: first.steps[a] for a, b in moves}
    return Line(first.start, tuple(steps_of.get(d, 0) for d in range(made.ndim)))
