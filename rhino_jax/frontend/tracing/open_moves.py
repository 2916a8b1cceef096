"""Rewriting of windows at constant positions, rotations and row numbers as indices.

`u.at[1:-1].add(v)` is a scatter whose indices happen to be constants, and its gradient
a gather: XLA's partitioner gathers their operands along a sharded dim. With a pad or a
slice instead, shards exchange borders.

A rotation is made of slices of one array along a dim that are concatenated in reverse
order: `jnp.roll` concatenates two slices; its gradient adds two slices, each padded
with zeros at the positions of the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from rhino_jax._compat import (
    TypedInputs,
    is_drop_var,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    retrace,
)
from rhino_jax.frontend.known_values import can_be_known, fold, known_value
from rhino_jax.frontend.regions import entering, region_kind, with_bodies, with_changed
from rhino_jax.frontend.registry import traits_of
from rhino_jax.frontend.rules.rotate import rotate
from rhino_jax.frontend.tracing.constant_windows import opened_window, shifted_shapes
from rhino_jax.frontend.tracing.padded_slices import Pads, opened_pad
from rhino_jax.frontend.tracing.row_numbers import RowNumbers
from rhino_jax.frontend.tracing.stepped_windows import Lines
from rhino_jax.ir.traits import OpKind


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

    def of(self, eqn: Any) -> tuple[Callable[..., Any], list[Any]] | None:
        """Return the rotation that an equation completes, and its operand; None where
        it completes none."""
        name = eqn.primitive.name
        if name not in ("concatenate", "add", "add_any") or len(eqn.invars) != 2:
            return None
        known = [v for v in eqn.invars if not is_literal(v) and v in self._parts]
        is_sum = name != "concatenate"
        found = _in_order([self._parts[v] for v in known], is_sum)
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
        return partial(rotate, shift=shift, axis=first.axis), [first.whole]


def _in_order(parts: Sequence[_Part], is_sum: bool) -> tuple[_Part, _Part] | None:
    """Return two slices of one array in their order in the result; None where they are
    not."""
    if len({(id(part.whole), part.axis) for part in parts}) != 1 or len(parts) != 2:
        return None
    first, second = parts
    if any((part.at is None) == is_sum for part in parts):
        return None
    if is_sum and (first.at or 0) > (second.at or 0):
        first, second = second, first
    return first, second


def _slice(eqn: Any, part: _Part | None) -> _Part | None:
    params, whole = eqn.params, eqn.invars[0]
    starts, stops = params["start_indices"], params["limit_indices"]
    if {*(params["strides"] or ()), 1} != {1}:
        return None
    shape = whole.aval.shape
    cut = [d for d, n in enumerate(shape) if (starts[d], stops[d]) != (0, n)]
    if len(cut) != 1:
        return None
    (d,) = cut
    return _Part(whole, d, starts[d], stops[d])


def _pad(eqn: Any, part: _Part | None) -> _Part | None:
    config, filling = eqn.params["padding_config"], eqn.invars[1]
    if part is None or part.at is not None or known_value(filling, {}) != 0:
        return None
    padded = [d for d, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    low, high, between = config[part.axis]
    size = low + part.stop - part.start + high
    is_whole = size == part.whole.aval.shape[part.axis]
    if padded != [part.axis] or between or min(low, high) < 0 or not is_whole:
        return None
    return _Part(part.whole, part.axis, part.start, part.stop, int(low))


_MAKES = {"slice": _slice, "pad": _pad}


_POINTWISE = (OpKind.ELEMENTWISE, OpKind.EXPONENTIAL, OpKind.CONVERSION)


def with_open_moves(jaxpr: Any) -> Any:
    """Return the jaxpr with pads, slices and rotations in place of equivalent
    equations.

    Args:
      jaxpr: closed or not.

    Returns:
      The same object where there are none.
    """
    return _opened(jaxpr, {}, RowNumbers())


def _opened(jaxpr: Any, entering: Mapping[int, np.ndarray], rows: RowNumbers) -> Any:
    """Rewrite a jaxpr as `with_open_moves` does.

    Args:
      jaxpr: closed or not.
      entering: position → value, of the inputs that are known.
      rows: row numbers among the inputs; those of its variables are added.
    """
    inner, rotations, pads = open_jaxpr(jaxpr), Rotations(), Pads()
    lines = Lines()
    rows.enter(inner.invars)
    known = {inner.invars[i]: value for i, value in entering.items()}
    for var, const in zip(inner.constvars, jaxpr_consts(jaxpr), strict=False):
        rows.see_const(var, const)
        if isinstance(const, np.ndarray) and can_be_known(var.aval):
            known[var] = const
    eqns: list[Any] = []
    grids, computed = shifted_shapes(jaxpr), set[Any]()
    for eqn in inner.eqns:
        values = [known_value(atom, known) for atom in eqn.invars]
        folded = fold(eqn, values)
        if folded is not None:
            known[eqn.outvars[0]] = folded
        made = [_with_bodies(eqn, values, rows)]
        first = eqn.invars[0] if eqn.invars else None
        is_known = first is None or is_literal(first)
        is_shifted = getattr(getattr(first, "aval", None), "shape", None) in grids
        is_narrow = is_shifted or (not is_known and first in computed)
        window = opened_window(eqn, values, is_narrow=is_narrow)
        window = window or opened_pad(eqn)
        move = rotations.of(eqn) or pads.of(eqn) or lines.of(eqn) or rows.of(eqn)
        if window is not None:
            made = _spelled(eqn, eqn.invars, window, inner.debug_info)
        elif move is not None:
            made = _spelled(eqn, move[1], move[0], inner.debug_info)
        for one in made:
            rotations.see(one)
            pads.see(one)
            lines.see(one)
            rows.see(one)
            if traits_of(one.primitive.name).kind in _POINTWISE:
                computed.update(one.outvars)
        eqns += made
    return with_changed(jaxpr, eqns, inner.outvars)


def _with_bodies(
    eqn: Any, values: Sequence[np.ndarray | None], rows: RowNumbers
) -> Any:
    """Return an equation with rewritten sub-jaxprs; the same object where none
    changes."""
    if region_kind(eqn) is None:
        return eqn
    known, inside = iter(entering(eqn, values)), iter(rows.inside(eqn))

    def opened(body: Any) -> Any:
        inner = next(inside)
        entering = {i: v for i, v in enumerate(next(known)) if v is not None}
        found = _opened(body, entering, inner)
        rows.leave(eqn, inner, open_jaxpr(found).outvars)
        return found

    return with_bodies(eqn, opened)


def _spelled(
    eqn: Any, operands: Sequence[Any], fn: Callable[..., Any], debug_info: Any
) -> list[Any]:
    """Return the equations of a function of some operands, with the results and the
    source line of an equation."""
    made, consts = retrace(
        lambda *xs: jax.tree.leaves(fn(*xs)), TypedInputs(operands, debug_info)
    )
    assert not consts, "a window has constants"
    if any(is_literal(v) or v in made.invars for v in made.outvars):
        return [eqn]  # Of one element: nothing is computed.
    names = dict(zip(made.invars, operands, strict=True))
    names.update(
        (inner, outer)
        for inner, outer in zip(made.outvars, eqn.outvars, strict=True)
        if not is_drop_var(outer)
    )

    def renamed(atom: Any) -> Any:
        return atom if is_literal(atom) else names.get(atom, atom)

    return [
        one.replace(
            invars=[*map(renamed, one.invars)],
            outvars=[*map(renamed, one.outvars)],
            source_info=eqn.source_info,
        )
        for one in made.eqns
    ]
