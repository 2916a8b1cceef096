"""Windows at constant places: scatters, gathers and dynamic slices as pads and slices.

A window is opened where it covers most of a dim, so that shards of the array and of the
window exchange borders: that of a cache's new token stays what it is, as it is written
in place. Elements are the same; of an addition, -0.0 outside of the window is 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


Start = Sequence[int]
"""Of every dim, the element of an array at which a window begins."""


def opened_window(
    eqn: Any, values: Sequence[np.ndarray | None]
) -> Callable[..., Any] | None:
    """Return a function of an equation's operands that does the same by pads and
    slices; None where it is no such window.

    Args:
      eqn: the equation.
      values: integers that its operands hold; None where they are not known.
    """
    find = _WINDOWS.get(eqn.primitive.name)
    return None if find is None else find(eqn, values)


def _is_most(start: Start, window: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a window lies inside, and covers a dim but for its borders."""
    places = list(zip(start, window, shape, strict=True))
    is_inside = all(0 <= at and at + n <= size for at, n, size in places)
    return is_inside and any(n < size < 2 * n for _, n, size in places)


def _starts(shape: Sequence[int], index: np.ndarray, dims: Sequence[int]) -> list[int]:
    start = [0] * len(shape)
    for d, value in zip(dims, index.tolist(), strict=True):
        start[d] = int(value)
    return start


def _scatter(
    eqn: Any, values: Sequence[np.ndarray | None]
) -> Callable[..., Any] | None:
    numbers, index = eqn.params["dimension_numbers"], values[1]
    shape = eqn.invars[0].aval.shape
    if index is None or index.ndim != 1 or numbers.operand_batching_dims:
        return None
    start = _starts(shape, index, numbers.scatter_dims_to_operand_dims)
    inserted = numbers.inserted_window_dims
    window = list(eqn.invars[2].aval.shape)
    for d in sorted(inserted):
        window.insert(d, 1)
    if not _is_most(start, window, shape):
        return None
    combine = _COMBINE[eqn.primitive.name]

    def run(x: Any, _: Any, updates: Any) -> Any:
        return _written(x, lax.expand_dims(updates, inserted), start, combine)

    return run


def _written(x: Any, window: Any, start: Start, combine: Any) -> Any:
    """`x`, a window of it combined with other elements."""
    edges = list(zip(start, window.shape, x.shape, strict=True))
    config = [(at, size - at - n, 0) for at, n, size in edges]
    padded = lax.pad(window, jnp.zeros((), window.dtype), config)
    if combine in (lax.add, lax.sub):
        return combine(x, padded)
    inside: Any = None
    for d, (at, n, size) in enumerate(edges):
        if n == size:
            continue
        place = lax.broadcasted_iota(jnp.int32, x.shape, d)
        here = (place >= at) & (place < at + n)
        inside = here if inside is None else inside & here
    return lax.select(inside, combine(x, padded), x)


def _replace(x: Any, padded: Any) -> Any:
    return padded


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "scatter": _replace,
    **dict.fromkeys(("scatter-add", "scatter_add"), lax.add),
    **dict.fromkeys(("scatter-sub", "scatter_sub"), lax.sub),
    **dict.fromkeys(("scatter-mul", "scatter_mul"), lax.mul),
    **dict.fromkeys(("scatter-min", "scatter_min"), lax.min),
    **dict.fromkeys(("scatter-max", "scatter_max"), lax.max),
}


def _gather(eqn: Any, values: Sequence[np.ndarray | None]) -> Callable[..., Any] | None:
    numbers, index = eqn.params["dimension_numbers"], values[1]
    shape, window = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    if index is None or index.ndim != 1 or numbers.operand_batching_dims:
        return None
    start = _starts(shape, index, numbers.start_index_map)
    if not _is_most(start, window, shape):
        return None
    stop = [at + n for at, n in zip(start, window, strict=True)]
    return lambda x, _: lax.squeeze(
        lax.slice(x, start, stop), numbers.collapsed_slice_dims
    )


def _clamped(
    shape: Sequence[int], window: Sequence[int], at: Sequence[np.ndarray | None]
) -> list[int] | None:
    """Where a dynamic slice begins, which stays inside."""
    if any(value is None for value in at):
        return None
    places = zip(at, window, shape, strict=True)
    return [min(max(int(a), 0), size - n) for a, n, size in places if a is not None]


def _dynamic_slice(
    eqn: Any, values: Sequence[np.ndarray | None]
) -> Callable[..., Any] | None:
    shape, window = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    start = _clamped(shape, window, values[1:])
    if start is None or not _is_most(start, window, shape):
        return None
    stop = [at + n for at, n in zip(start, window, strict=True)]
    return lambda x, *_: lax.slice(x, start, stop)


def _update_slice(
    eqn: Any, values: Sequence[np.ndarray | None]
) -> Callable[..., Any] | None:
    shape, window = (v.aval.shape for v in eqn.invars[:2])
    start = _clamped(shape, window, values[2:])
    if start is None or not _is_most(start, window, shape):
        return None
    return lambda x, update, *_: _written(x, update, start, _replace)


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
    **dict.fromkeys(_COMBINE, _scatter),
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _update_slice,
    "split": _split,
}
