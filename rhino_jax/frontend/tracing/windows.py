"""Windows at constant positions, or at positions in steps: scatters, gathers and
dynamic slices as pads and slices.

A window is rewritten where it covers most of a dim, so that shards of the array and of
the window exchange borders; so is a scatter to any position of an array that other ops
shift, as the edges of a grid and sources in it, or that an elementwise op makes, which
then writes the window, too: XLA turns a scatter to a constant position into an update
of a slice, for which it gathers the array (8 H100, jax 0.10.2). A new token in a cache
stays a dynamic update, which is done in place.

Of `x.at[::2].set(v)` JAX numbers the positions at run time, and to XLA's partitioner
they might be any: it gathers the updates, or all of the array, along a sharded dim
(CPU, v5e:2x4 and 8 H100, jax 0.10.2). Padded between its elements, the update has the
array's shards. Elements are the same; in an addition, -0.0 outside the window becomes
0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rhino_jax._compat import open_jaxpr
from rhino_jax.frontend.regions import closed_region_jaxprs, region_kind
from rhino_jax.frontend.rules import reduce
from rhino_jax.frontend.rules.gather import REDUCERS, SUBTRACTING, IndexedDims
from rhino_jax.frontend.tracing.integers import Columns, Integers, Line
from rhino_jax.ir.program import RegionKind


Shape = tuple[int, ...]

Start = Sequence[int]
"""For every dim, the element of an array at which a window begins."""

Move = tuple[Callable[..., Any], Sequence[Any]]
"""A function that does the same as an equation, and the variables of its operands."""


def opened_window(eqn: Any, integers: Integers, *, is_narrow: bool) -> Move | None:
    """Return the pads and slices that do the same as an equation; None where it is no
    such window.

    Args:
      eqn: the equation.
      integers: what its operands hold.
      is_narrow: whether a scatter is rewritten however narrow its window is.
    """
    if eqn.primitive.name == "gather" or eqn.primitive.name in COMBINE:
        return _indexed(eqn, integers.columns(eqn.invars[1]), is_narrow)
    run = _unrolled(eqn, integers)
    return None if run is None else (run, eqn.invars)


def shifted_shapes(jaxpr: Any) -> frozenset[Shape]:
    """Return the shapes of arrays of which most is sliced, in a jaxpr and in its
    calls."""
    found = set[Shape]()
    for eqn in open_jaxpr(jaxpr).eqns:
        if region_kind(eqn) is RegionKind.CALL:
            found = found.union(*map(shifted_shapes, closed_region_jaxprs(eqn)))
        elif eqn.primitive.name == "slice":
            shape, window = (v.aval.shape for v in (*eqn.invars, *eqn.outvars))
            if _is_most(eqn.params["start_indices"], window, shape):
                found.add(shape)
    return frozenset(found)


def _is_most(start: Start, window: Shape, shape: Shape) -> bool:
    """Whether a window lies inside, and covers some dim except for its borders."""
    places = [*zip(start, window, shape, strict=True)]
    is_inside = all(0 <= at and at + n <= size for at, n, size in places)
    return is_inside and any(n < size < 2 * n for _, n, size in places)


def _indexed(eqn: Any, columns: Columns, is_narrow: bool) -> Move | None:
    """Return the slice that a gather is, or the write that a scatter is; None where its
    window is not in steps along dims of its own, is out of bounds, or covers little."""
    dims = IndexedDims.of(eqn.params["dimension_numbers"])
    array, _, *updates = eqn.invars
    window = (*updates, *eqn.outvars)[0].aval.shape
    is_known = None not in columns and len(columns) == len(dims.indexed)
    if not is_known or dims.batch:
        return None
    lines: dict[int, Any] = dict(zip(dims.indexed, columns, strict=True))
    batch = [d for d in range(len(window)) if d not in dims.windows]
    contiguous = iter(dims.windows)
    order, new, shape = list[int](), list[int](), array.aval.shape
    start, counts, steps = [0] * len(shape), [1] * len(shape), [1] * len(shape)
    for d in range(len(shape)):
        line = lines.get(d) or Line(0, ())
        along = [b for b, step in enumerate(line.steps) if step]
        start[d] = line.start
        if d not in dims.dropped:
            if along:
                return None
            order.append(next(contiguous))
        elif len(along) == 1:
            steps[d] = line.steps[along[0]]
            order.append(batch[along[0]])
        else:
            new.append(d)
            continue
        counts[d] = window[order[-1]]
    spans = tuple((n - 1) * step + 1 for n, step in zip(counts, steps, strict=True))
    ends = [(at, at + n, size) for at, n, size in zip(start, spans, shape, strict=True)]
    is_inside = all(0 <= at and stop <= size for at, stop, size in ends)
    is_all = sorted(order) == [*range(len(window))]
    if not is_inside or not is_all or any(step < 1 for step in steps):
        return None
    is_stepped = any(step > 1 for step in steps)
    if is_stepped:
        sizes = zip(counts, steps, shape, strict=True)
        fits = all(2 * n * step > size for n, step, size in sizes)
    else:
        is_constant = all(line.is_constant for line in lines.values())
        fits = (is_narrow and bool(updates)) or _is_most(start, spans, shape)
        fits = fits and is_constant
    if not fits:
        return None
    if updates:
        combine = COMBINE[eqn.primitive.name]

        def write(x: Any, other: Any) -> Any:
            other = lax.expand_dims(lax.transpose(other, order), new)
            return written(x, other, start, combine, steps)

        return write, (array, *updates)
    stops = [stop for _, stop, _ in ends]
    back = sorted(range(len(order)), key=order.__getitem__)

    def take(x: Any) -> Any:
        part = lax.slice(x, start, stops, steps if is_stepped else None)
        return lax.transpose(lax.squeeze(part, new), back)

    return take, (array,)


def written(
    x: Any, window: Any, start: Start, combine: Any, steps: Sequence[int] = ()
) -> Any:
    """Return `x` with a window of it combined with other elements.

    Args:
      x: the array.
      window: the other elements.
      start: the element of `x` at which the window begins.
      combine: function of both elements.
      steps: steps of the window's elements, for every dim; empty: all are one.
    """
    steps = steps or (1,) * x.ndim
    spans = [(n - 1) * step + 1 for n, step in zip(window.shape, steps, strict=True)]
    edges = list(zip(start, spans, x.shape, steps, strict=True))
    config = [(at, size - at - n, step - 1) for at, n, size, step in edges]
    padded = lax.pad(window, jnp.zeros((), window.dtype), config)
    if combine in (lax.add, lax.sub):
        return combine(x, padded)
    inside: Any = None
    for d, (at, n, size, step) in enumerate(edges):
        if n == size and step == 1:
            continue
        place = lax.broadcasted_iota(jnp.int32, x.shape, d)
        here = (place >= at) & (place < at + n)
        if step > 1:
            here &= (place - at) % step == 0
        inside = here if inside is None else inside & here
    found = combine(x, padded)
    return found if inside is None else lax.select(inside, found, x)


def _replace(x: Any, padded: Any) -> Any:
    return padded


COMBINE: Mapping[str, Callable[[Any, Any], Any]] = {
    "scatter": _replace,
    **dict.fromkeys(SUBTRACTING, lax.sub),
    **{name: reduce.COMBINE[word] for name, word in REDUCERS.items()},
}


def _unrolled(eqn: Any, integers: Integers) -> Callable[..., Any] | None:
    """Return the slices that a split, dynamic slice or update is; None for other ops,
    where the position is unknown, or where it has little of the array.

    A dynamic position is clamped, so that the window stays inside.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "split":
        sizes, axis = params["sizes"], params["axis"]
        stops = np.cumsum(sizes).tolist()
        if len(sizes) < 2 or 2 * max(sizes) <= stops[-1]:
            return None
        return lambda x: [
            lax.slice_in_dim(x, stop - size, stop, axis=axis)
            for size, stop in zip(sizes, stops, strict=True)
        ]
    if name not in ("dynamic_slice", "dynamic_update_slice"):
        return None
    array, *at = eqn.invars
    window = at.pop(0).aval.shape if "update" in name else params["slice_sizes"]
    places = zip(map(integers.of, at), window, array.aval.shape, strict=True)
    start = [
        min(max(line.start, 0), size - n)
        for line, n, size in places
        if isinstance(line, Line)
    ]
    if len(start) < len(at) or not _is_most(start, window, array.aval.shape):
        return None
    if "update" in name:
        return lambda x, update, *_: written(x, update, start, _replace)
    stop = [at + n for at, n in zip(start, window, strict=True)]
    return lambda x, *_: lax.slice(x, start, stop)
