"""Windows at constant positions: scatters, gathers and dynamic slices as pads and
slices.

A window is rewritten where it covers most of a dim, so that shards of the array and of
the window exchange borders; so is a scatter to any position of an array that other ops
shift, as the edges of a grid and sources in it, or that an elementwise op makes, which
then writes the window, too: XLA turns a scatter to a constant position into an update
of a slice, for which it gathers the array (8 H100, jax 0.10.2). A new token in a cache
stays a dynamic update, which is done in place. Elements are the same; in an addition,
-0.0 outside the window becomes 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rhino_jax._compat import open_jaxpr
from rhino_jax.frontend.regions import closed_region_jaxprs, region_kind
from rhino_jax.ir.program import RegionKind


Shape = tuple[int, ...]

Start = Sequence[int]
"""For every dim, the element of an array at which a window begins."""


def opened_window(
    eqn: Any, values: Sequence[np.ndarray | None], *, is_narrow: bool
) -> Callable[..., Any] | None:
    """Return a function of an equation's operands that does the same by pads and
    slices; None where it is no such window.

    Args:
      eqn: the equation.
      values: integers that its operands hold; None where they are unknown.
      is_narrow: whether a scatter is rewritten however narrow its window is.
    """
    if eqn.primitive.name in COMBINE:
        return _scatter(eqn, values, is_narrow)
    find = _WINDOWS.get(eqn.primitive.name)
    return None if find is None else find(eqn, values)


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


def _is_inside(start: Start, window: Shape, shape: Shape) -> bool:
    places = zip(start, window, shape, strict=True)
    return all(0 <= at and at + n <= size for at, n, size in places)


def _is_most(start: Start, window: Shape, shape: Shape) -> bool:
    """Whether a window lies inside, and covers some dim except for its borders."""
    sizes = zip(window, shape, strict=True)
    is_most = any(n < size < 2 * n for n, size in sizes)
    return is_most and _is_inside(start, window, shape)


def _starts(
    eqn: Any, index: np.ndarray | None, dims: Sequence[int]
) -> list[int] | None:
    """Return where the one window of a gather or scatter begins; None where that is
    unknown, or there are several."""
    numbers = eqn.params["dimension_numbers"]
    if index is None or index.ndim != 1 or numbers.operand_batching_dims:
        return None
    start = [0] * eqn.invars[0].aval.ndim
    for d, value in zip(dims, index.tolist(), strict=True):
        start[d] = value
    return start


def _scatter(
    eqn: Any, values: Sequence[np.ndarray | None], is_narrow: bool
) -> Callable[..., Any] | None:
    numbers = eqn.params["dimension_numbers"]
    start = _starts(eqn, values[1], numbers.scatter_dims_to_operand_dims)
    inserted = numbers.inserted_window_dims
    window = list(eqn.invars[2].aval.shape)
    for d in sorted(inserted):
        window.insert(d, 1)
    fits = _is_inside if is_narrow else _is_most
    if start is None or not fits(start, tuple(window), eqn.invars[0].aval.shape):
        return None
    combine = COMBINE[eqn.primitive.name]

    def run(x: Any, _: Any, updates: Any) -> Any:
        return written(x, lax.expand_dims(updates, inserted), start, combine)

    return run


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


COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "scatter": _replace,
    **dict.fromkeys(("scatter-add", "scatter_add"), lax.add),
    **dict.fromkeys(("scatter-sub", "scatter_sub"), lax.sub),
    **dict.fromkeys(("scatter-mul", "scatter_mul"), lax.mul),
    **dict.fromkeys(("scatter-min", "scatter_min"), lax.min),
    **dict.fromkeys(("scatter-max", "scatter_max"), lax.max),
}


def _sliced(
    eqn: Any, start: Start | None, dropped: Sequence[int] = ()
) -> Callable[..., Any] | None:
    """Return the slice that reads a window; None where it reads little of the array."""
    shape, window = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    if start is None or not _is_most(start, window, shape):
        return None
    stop = [at + n for at, n in zip(start, window, strict=True)]
    return lambda x, *_: lax.squeeze(lax.slice(x, start, stop), dropped)


def _gather(eqn: Any, values: Sequence[np.ndarray | None]) -> Callable[..., Any] | None:
    numbers = eqn.params["dimension_numbers"]
    start = _starts(eqn, values[1], numbers.start_index_map)
    return _sliced(eqn, start, numbers.collapsed_slice_dims)


def _clamped(
    shape: Sequence[int], window: Sequence[int], at: Sequence[np.ndarray | None]
) -> list[int] | None:
    """Return where a dynamic slice begins, clamped to stay inside; None where that is
    unknown."""
    places = zip(at, window, shape, strict=True)
    known = [min(max(int(a), 0), size - n) for a, n, size in places if a is not None]
    return known if len(known) == len(at) else None


def _dynamic_slice(
    eqn: Any, values: Sequence[np.ndarray | None]
) -> Callable[..., Any] | None:
    shape, window = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    return _sliced(eqn, _clamped(shape, window, values[1:]))


def _update_slice(
    eqn: Any, values: Sequence[np.ndarray | None]
) -> Callable[..., Any] | None:
    shape, window = (v.aval.shape for v in eqn.invars[:2])
    start = _clamped(shape, window, values[2:])
    if start is None or not _is_most(start, window, shape):
        return None
    return lambda x, update, *_: written(x, update, start, _replace)


def _split(eqn: Any, values: Sequence[np.ndarray | None]) -> Callable[..., Any] | None:
    sizes, axis = eqn.params["sizes"], eqn.params["axis"]
    stops = np.cumsum(sizes).tolist()
    if len(sizes) < 2 or 2 * max(sizes) <= stops[-1]:
        return None
    return lambda x: [
        lax.slice_in_dim(x, stop - size, stop, axis=axis)
        for size, stop in zip(sizes, stops, strict=True)
    ]


_WINDOWS: dict[str, Callable[[Any, Any], Callable[..., Any] | None]] = {
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _update_slice,
    "split": _split,
}
