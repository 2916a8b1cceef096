"""Rewriting of windows at constant positions, rotations and row numbers as indices.

`u.at[1:-1].add(v)` is a scatter whose indices happen to be constants, and its gradient
a gather: XLA's partitioner gathers their operands along a sharded dim. With a pad or a
slice instead, shards exchange borders.

A rotation is made of slices of one array along a dim that are concatenated in reverse
order: `jnp.roll` concatenates two slices; its gradient adds two slices, each padded
with zeros at the positions of the other one.

Slices of padded arrays become pads: `q = jnp.pad(u, 1)`, then `q[2:, 1:-1]`.
The padded dim has other shards than the array: XLA exchanges borders for the pad, and
again, of several rows, for each slice. As one pad, of which one end may be negative, a
slice has dims as long as the array's, so that it exchanges the rows that it shifts and
no others, as a program by hand does (a stencil of five points on 8 H100, jax 0.10.2:
157 us, now 112). Elements are the same.

Row numbers as indices, `x[jnp.arange(n)[:, None], i]`, become a batching dim.
To XLA and to the rules of gathers and scatters, any index may point to any row. With a
batching dim in place of the row numbers, as `vmap` has it, each row is indexed on its
own, so that rows are sharded or divided into micro-batches without communication.
Elements are the same: row numbers are never out of bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import lax

from rhino_jax._compat import (
    TypedInputs,
    bind_eqn,
    is_drop_var,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    retrace,
)
from rhino_jax.frontend.known_values import known_value
from rhino_jax.frontend.regions import (
    PLAIN_CALLS,
    closed_region_jaxprs,
    region_kind,
    with_bodies,
    with_changed,
)
from rhino_jax.frontend.registry import traits_of
from rhino_jax.frontend.rules.gather import IndexedDims
from rhino_jax.frontend.rules.rotate import rotate
from rhino_jax.frontend.tracing.integers import Integers
from rhino_jax.frontend.tracing.sliced_products import sliced_product
from rhino_jax.frontend.tracing.windows import (
    COMBINE,
    Move,
    opened_window,
    shifted_shapes,
)
from rhino_jax.ir.traits import OpKind


_FILLS = frozenset({"pad", "convert_element_type", "broadcast_in_dim"})


def opened_pad(eqn: Any) -> Move | None:
    """Return the equations of a call that does nothing but pad, as `jnp.pad`; None for
    all other equations."""
    bodies = closed_region_jaxprs(eqn)
    if eqn.primitive.name not in PLAIN_CALLS or not bodies:
        return None
    (body,) = bodies
    names = {inner.primitive.name for inner in open_jaxpr(body).eqns}
    if "pad" not in names or not names <= _FILLS:
        return None
    opened, consts = open_jaxpr(body), jaxpr_consts(body)
    return partial(jax.core.eval_jaxpr, opened, consts), eqn.invars


def moved_pad(eqn: Any, made: Mapping[Any, Any]) -> Move | None:
    """Return the pad that a slice of a padded array is; None where it is none, or takes
    little of the array.

    Args:
      eqn: the equation.
      made: variable → the equation that computes it.
    """
    if eqn.primitive.name != "slice":
        return None
    pad = made.get(eqn.invars[0])
    if pad is None or pad.primitive.name != "pad" or is_literal(pad.invars[0]):
        return None
    starts = [int(start) for start in eqn.params["start_indices"]]
    length = eqn.outvars[0].aval.shape
    strides = eqn.params["strides"] or (1,) * len(starts)
    config, stops = [], []
    for (low, high, between), size, start, n, step, whole in zip(
        pad.params["padding_config"],
        pad.invars[0].aval.shape,
        starts,
        length,
        strides,
        eqn.invars[0].aval.shape,
        strict=True,
    ):
        if (start, n, step) == (0, whole, 1):
            config.append((low, high, between))
            stops.append(n)
            continue
        first, stop = start - int(low), n * step
        shared = min(size, first + stop) - max(first, 0)
        if between or 2 * shared <= max(size, stop):
            return None
        config.append((-first, first + stop - size, 0))
        stops.append(stop)

    def run(x: Any, fill: Any) -> Any:
        moved = lax.pad(x, fill, config)
        if max(strides, default=1) == 1:
            return moved
        return lax.slice(moved, (0,) * len(stops), stops, strides)

    return run, pad.invars


def by_rows(eqn: Any, integers: Integers) -> Move | None:
    """Return a gather or scatter with batching dims in place of row numbers; None where
    an equation has none.

    Args:
      eqn: the equation.
      integers: what its operands hold.
    """
    if eqn.primitive.name not in ("gather", *COMBINE):
        return None
    numbers = eqn.params["dimension_numbers"]
    old = IndexedDims.of(numbers)
    pairs = dict(zip(old.batch, old.paired, strict=True))
    shape, counts = (v.aval.shape for v in eqn.invars[:2])
    left: list[int] = []
    columns = integers.columns(eqn.invars[1]) or (None,) * len(old.indexed)
    for column, (dim, line) in enumerate(zip(old.indexed, columns, strict=True)):
        along = None if line is None else line.along
        if (
            along is not None
            and along not in pairs.values()
            and counts[along] == shape[dim]
            and dim in old.dropped
        ):
            pairs[dim] = along
        else:
            left.append(column)
    if not left or len(left) == len(old.indexed):
        return None
    dims = sorted(pairs)
    new = IndexedDims(
        tuple(old.indexed[c] for c in left),
        tuple(d for d in old.dropped if d not in pairs),
        tuple(dims),
        tuple(pairs[d] for d in dims),
        old.windows,
    )
    changed = {"indices_are_sorted": False, "dimension_numbers": new.put(numbers)}
    pieces = integers.pieces.get(eqn.invars[1])
    some = [eqn.invars[1]] if pieces is None else [pieces[c] for c in left]

    def run(x: Any, *operands: Any) -> Any:
        arrays, updates = list(operands[: len(some)]), operands[len(some) :]
        if pieces is None:
            (whole,) = arrays
            last = whole.ndim - 1
            arrays = [lax.slice_in_dim(whole, c, c + 1, axis=last) for c in left]
        indices = lax.concatenate(arrays, arrays[0].ndim - 1)
        return bind_eqn(eqn, [x, indices, *updates], eqn.params | changed)

    return run, [eqn.invars[0], *some, *eqn.invars[2:]]


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


def _rotation(eqn: Any, made: Mapping[Any, Any]) -> Move | None:
    """Return the rotation that an equation completes; None where it completes none.

    Args:
      eqn: the equation.
      made: variable → the equation that computes it.
    """
    name = eqn.primitive.name
    if name not in ("concatenate", "add", "add_any") or len(eqn.invars) != 2:
        return None
    is_sum = name != "concatenate"
    parts = [part for v in eqn.invars if (part := _part(v, made)) is not None]
    if len(parts) != 2 or (not is_sum and eqn.params["dimension"] != parts[0].axis):
        return None
    last = max(parts, key=lambda part: part.start)
    size = last.whole.aval.shape[last.axis]
    shift = size - last.start
    expected = [
        replace(last, stop=size, at=0 if is_sum else None),
        replace(last, start=0, stop=last.start, at=shift if is_sum else None),
    ]
    if parts not in (expected, expected[::-1] if is_sum else expected):
        return None
    return partial(rotate, shift=shift, axis=last.axis), [last.whole]


def _part(atom: Any, made: Mapping[Any, Any]) -> _Part | None:
    """Return the slice that a variable is; None where it is none."""
    eqn: Any = None if is_literal(atom) else made.get(atom)
    name = eqn and eqn.primitive.name
    if name == "slice":
        params, shape = eqn.params, eqn.invars[0].aval.shape
        bounds = [*zip(params["start_indices"], params["limit_indices"], strict=True)]
        cut = [d for d, n in enumerate(shape) if bounds[d] != (0, n)]
        if len(cut) != 1 or {*(params["strides"] or ()), 1} != {1}:
            return None
        return _Part(eqn.invars[0], cut[0], *bounds[cut[0]])
    part = _part(eqn.invars[0], made) if name == "pad" else None
    if part is None or part.at is not None or known_value(eqn.invars[1], {}) != 0:
        return None
    config = eqn.params["padding_config"]
    padded = [d for d, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    low, high, between = config[part.axis]
    size = low + part.stop - part.start + high
    is_whole = size == part.whole.aval.shape[part.axis]
    if padded != [part.axis] or between or min(low, high) < 0 or not is_whole:
        return None
    return replace(part, at=int(low))


_POINTWISE = (OpKind.ELEMENTWISE, OpKind.EXPONENTIAL, OpKind.CONVERSION)


def with_open_moves(jaxpr: Any) -> Any:
    """Return the jaxpr with pads, slices and rotations in place of equivalent
    equations.

    Args:
      jaxpr: closed or not.

    Returns:
      The same object where there are none.
    """
    return _opened(jaxpr, Integers({}))


def _opened(jaxpr: Any, integers: Integers) -> Any:
    """Rewrite a jaxpr as `with_open_moves` does.

    Args:
      jaxpr: closed or not.
      integers: those of the inputs; those of other variables are added.
    """
    inner, eqns = open_jaxpr(jaxpr), list[Any]()
    for var, const in zip(inner.constvars, jaxpr_consts(jaxpr), strict=False):
        integers.see_const(var, const)
    made: dict[Any, Any] = {}  # variable → the equation that computes it
    grids = shifted_shapes(jaxpr)
    read = [v for eqn in inner.eqns for v in eqn.invars] + [*inner.outvars]
    readers = Counter(v for v in read if not is_literal(v))
    for eqn in inner.eqns:
        first = eqn.invars[0] if eqn.invars else None
        before = None if first is None or is_literal(first) else made.get(first)
        is_computed = before and traits_of(before.primitive.name).kind in _POINTWISE
        is_shifted = getattr(getattr(first, "aval", None), "shape", None) in grids
        move = (
            opened_window(eqn, integers, is_narrow=is_shifted or bool(is_computed))
            or opened_pad(eqn)
            or _rotation(eqn, made)
            or moved_pad(eqn, made)
            or sliced_product(eqn, made, readers)
            or by_rows(eqn, integers)
        )
        if move is None:
            found = [_with_bodies(eqn, integers)]
        else:
            found = _spelled(eqn, *move, inner.debug_info)
        for one in found:
            integers.see(one)
            made.update(dict.fromkeys(one.outvars, one))
        eqns += found
    return with_changed(jaxpr, eqns, inner.outvars)


def _with_bodies(eqn: Any, integers: Integers) -> Any:
    """Return an equation with rewritten sub-jaxprs; the same object where none
    changes."""
    if region_kind(eqn) is None:
        return eqn
    inside = iter(integers.inside(eqn))

    def opened(body: Any) -> Any:
        inputs = open_jaxpr(body).invars
        inner = Integers(dict(zip(inputs, next(inside), strict=False)))
        found = _opened(body, inner)
        integers.leave(eqn, inner, open_jaxpr(found).outvars)
        return found

    return with_bodies(eqn, opened)


def _spelled(
    eqn: Any, fn: Callable[..., Any], operands: Sequence[Any], debug_info: Any
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
