"""Rotations: slices of one array along a dim that are concatenated in reverse order.

`jnp.roll` concatenates two slices; its gradient adds two slices, each padded with zeros
at the positions of the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rhino_jax._compat import is_literal
from rhino_jax.frontend.rules.rotate import rotate
from rhino_jax.frontend.trip_count import scalar_number


@dataclass(frozen=True, slots=True)
class _Part:
    """A slice of an array, along one dim, or a padded one.

    Attributes:
      whole: the variable of the array.
      axis: the dim.
      start, stop: range of its elements.
      at: position of the slice among padding zeros; None without padding.
    """

    whole: Any
    axis: int
    start: int
    stop: int
    at: int | None = None


class Rotations:
    """The slices of arrays that the equations of a jaxpr have computed so far."""

    def __init__(self) -> None:
        self._parts: dict[Any, _Part] = {}

    def see(self, eqn: Any) -> None:
        """Record an equation's result, where that is a slice of an array."""
        find = _MAKES.get(eqn.primitive.name)
        if find is None or is_literal(eqn.invars[0]):
            return
        part = find(eqn, self._parts.get(eqn.invars[0]))
        if part is not None:
            self._parts[eqn.outvars[0]] = part

    def of(self, eqn: Any) -> tuple[Callable[..., Any], Any] | None:
        """Return the rotation that an equation completes, and the variable that it
        rotates; None where it completes none."""
        name = eqn.primitive.name
        if name not in ("concatenate", "add", "add_any") or len(eqn.invars) != 2:
            return None
        parts = [None if is_literal(v) else self._parts.get(v) for v in eqn.invars]
        is_sum = name != "concatenate"
        found = _in_order([p for p in parts if p is not None], is_sum)
        if found is None or (not is_sum and eqn.params["dimension"] != found[0].axis):
            return None
        first, second = found
        size = first.whole.aval.shape[first.axis]
        is_around = first.stop == size and second.start == 0
        if not is_around or first.start != second.stop:
            return None
        if is_sum and (first.at != 0 or second.at != size - first.start):
            return None
        shift = size - first.start
        return partial(rotate, shift=shift, axis=first.axis), first.whole


def _in_order(parts: Sequence[_Part], is_sum: bool) -> tuple[_Part, _Part] | None:
    """Return two slices of one array in their order in the result; None where they are
    not."""
    if len(parts) != 2:
        return None
    first, second = parts
    if first.whole is not second.whole or first.axis != second.axis:
        return None
    if (first.at is None) == is_sum or (second.at is None) == is_sum:
        return None
    if is_sum and (first.at or 0) > (second.at or 0):
        first, second = second, first
    return first, second


def _slice(eqn: Any, part: _Part | None) -> _Part | None:
    params, whole = eqn.params, eqn.invars[0]
    starts, stops = params["start_indices"], params["limit_indices"]
    if params["strides"] is not None and set(params["strides"]) != {1}:
        return None
    shape = whole.aval.shape
    cut = [d for d, n in enumerate(shape) if (starts[d], stops[d]) != (0, n)]
    if len(cut) != 1:
        return None
    (d,) = cut
    return _Part(whole, d, starts[d], stops[d])


def _pad(eqn: Any, part: _Part | None) -> _Part | None:
    config, filling = eqn.params["padding_config"], eqn.invars[1]
    is_zero = is_literal(filling) and scalar_number(filling.val) == 0
    if part is None or part.at is not None or not is_zero:
        return None
    padded = [d for d, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    low, high, between = config[part.axis]
    size = low + part.stop - part.start + high
    is_whole = size == part.whole.aval.shape[part.axis]
    if padded != [part.axis] or between or min(low, high) < 0 or not is_whole:
        return None
    return _Part(part.whole, part.axis, part.start, part.stop, int(low))


_MAKES = {"slice": _slice, "pad": _pad}
