"""Scatters and gathers at positions in steps as pads between elements, and as slices:
`x.at[::2].set(v)`.

JAX numbers the positions at run time, and to XLA's partitioner they might be any: it
gathers the updates, or all of the array, along a sharded dim (CPU, v5e:2x4 and 8 H100,
jax 0.10.2). Padded between its elements, the update has the array's shards. Elements
are the same; in an addition, -0.0 between them becomes 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jax import lax

from rhino_jax._compat import is_literal
from rhino_jax.frontend.known_values import known_value
from rhino_jax.frontend.tracing.constant_windows import COMBINE, written


@dataclass(frozen=True, slots=True)
class Line:
    """Integers `start + Σ steps[d] · i[d]` of an array, over its positions `i`."""

    start: int
    steps: tuple[int, ...]

    @property
    def is_constant(self) -> bool:
        return not any(self.steps)


class Lines:
    """The arrays of integers in steps among the equations of a jaxpr that were seen so
    far, and the indices that are made of several."""

    def __init__(self) -> None:
        self._lines: dict[Any, Line] = {}
        self._indices: dict[Any, list[Line]] = {}

    def see(self, eqn: Any) -> None:
        """Record an equation's result, where it has integers in steps."""
        if len(eqn.outvars) != 1:
            return
        (made,), name = eqn.outvars, eqn.primitive.name
        is_followed = _has_integers(made.aval)
        if not is_followed or made.aval.size > np.iinfo(made.aval.dtype).max:
            return
        lines = [self._line(atom) for atom in eqn.invars]
        if name == "concatenate" and None not in lines:
            sizes = {atom.aval.shape[-1] for atom in eqn.invars}
            if eqn.params["dimension"] == made.aval.ndim - 1 and sizes == {1}:
                self._indices[made] = [line for line in lines if line]
        elif name in _FOLLOWED and None not in lines:
            found = _FOLLOWED[name](eqn, lines)
            if found is not None:
                self._lines[made] = found

    def _line(self, atom: Any) -> Line | None:
        if not is_literal(atom):
            return self._lines.get(atom)
        value = known_value(atom, {})
        if value is None or value.ndim or not _has_integers(atom.aval):
            return None
        return Line(int(value), ())

    def of(self, eqn: Any) -> tuple[Callable[..., Any], Sequence[Any]] | None:
        """Return the write or slice that a scatter or gather in steps is, and its
        operands; None where it is none, or takes a small part of the array."""
        name = eqn.primitive.name
        combine = COMBINE.get(name)
        if (combine is None and name != "gather") or is_literal(eqn.invars[1]):
            return None
        (array, indices), numbers = eqn.invars[:2], eqn.params["dimension_numbers"]
        one = self._lines.get(indices)
        lines = self._indices.get(indices, [one] if one else [])
        if not lines or numbers.operand_batching_dims:
            return None
        if combine is None:
            addressed = numbers.start_index_map
            dims = numbers.offset_dims, numbers.collapsed_slice_dims
            window = eqn.outvars[0].aval.shape
        else:
            addressed = numbers.scatter_dims_to_operand_dims
            dims = numbers.update_window_dims, numbers.inserted_window_dims
            window = eqn.invars[2].aval.shape
        if len(lines) != len(addressed):
            return None
        at = dict(zip(addressed, lines, strict=True))
        places = _places(array.aval.shape, window, *dims, at)
        if places is None:
            return None
        if combine is None:
            return places.taken, (array,)
        return partial(places.written, combine=combine), (array, eqn.invars[2])


def _has_integers(aval: Any) -> bool:
    """Whether values of a type are arrays of integers, and no PRNG keys."""
    dtype = getattr(aval, "dtype", None)
    return isinstance(dtype, np.dtype) and bool(np.issubdtype(dtype, np.integer))


@dataclass(frozen=True, slots=True)
class _Places:
    """The elements of an array that a window is read from or written to, in steps.

    Attributes:
      order: dims of the window, in the order of the array's.
      start, steps: the first element and the step along each dim of the array.
      stops: the last element along each dim, plus one.
      new: dims of the array that the window lacks.
    """

    order: list[int]
    start: list[int]
    steps: list[int]
    stops: list[int]
    new: list[int]

    def taken(self, x: Any) -> Any:
        """Return the window of an array."""
        window = lax.slice(x, self.start, self.stops, self.steps)
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return lax.transpose(lax.squeeze(window, self.new), back)

    def written(self, x: Any, window: Any, combine: Any) -> Any:
        """Return an array with a window combined with the elements at its places."""
        window = lax.expand_dims(lax.transpose(window, self.order), self.new)
        return written(x, window, self.start, combine, self.steps)


def _places(
    shape: Sequence[int],
    window: Sequence[int],
    offsets: Sequence[int],
    dropped: Sequence[int],
    lines: Mapping[int, Line],
) -> _Places | None:
    """Return where the elements of a window are in an array.

    Args:
      shape: shape of the array.
      window: shape of the window.
      offsets: its dims that are contiguous dims of the array, in order.
      dropped: dims of the array of which the window has a single element.
      lines: dim of the array → its indices.
    Returns:
      None where it is not in steps along dims of its own, is out of bounds, or covers
      less than half of a dim.
    """
    batch = [d for d in range(len(window)) if d not in offsets]
    contiguous = iter(offsets)
    order, new = list[int](), list[int]()
    start, steps, stops = [0] * len(shape), [1] * len(shape), list(shape)
    for d, size in enumerate(shape):
        line = lines.get(d, Line(0, ()))
        along = [b for b, step in enumerate(line.steps) if step]
        start[d], count = line.start, 1
        if d not in dropped:
            if along:
                return None
            order.append(next(contiguous))
            count = window[order[-1]]
        elif len(along) == 1:
            steps[d] = line.steps[along[0]]
            order.append(batch[along[0]])
            count = window[order[-1]]
        else:
            new.append(d)
        stops[d] = start[d] + (count - 1) * steps[d] + 1
        is_inside = start[d] >= 0 and steps[d] >= 1 and stops[d] <= size
        if not is_inside or 2 * count * steps[d] <= size:
            return None
    is_all = sorted(order) == list(range(len(window)))
    return (
        _Places(order, start, steps, stops, new) if is_all and max(steps) > 1 else None
    )


def _iota(eqn: Any, lines: Sequence[Any]) -> Line:
    rank = len(eqn.params["shape"])
    return Line(0, tuple(int(d == eqn.params["dimension"]) for d in range(rank)))


def _sum(eqn: Any, lines: Sequence[Any]) -> Line | None:
    a, b = lines
    rank = eqn.outvars[0].aval.ndim
    if {len(a.steps), len(b.steps)} - {rank} and not (a.is_constant or b.is_constant):
        return None
    steps = (x.steps or (0,) * rank for x in lines)
    return Line(a.start + b.start, tuple(map(sum, zip(*steps, strict=True))))


def _product(eqn: Any, lines: Sequence[Any]) -> Line | None:
    a, b = sorted(lines, key=lambda line: line.is_constant)
    if not b.is_constant:
        return None
    return Line(a.start * b.start, tuple(s * b.start for s in a.steps))


def _broadcast(eqn: Any, lines: Sequence[Any]) -> Line:
    shape, (line,) = eqn.params["shape"], lines
    steps = [0] * len(shape)
    dims = eqn.params["broadcast_dimensions"]
    for d, step, size in zip(dims, line.steps, eqn.invars[0].aval.shape, strict=True):
        steps[d] = step if size == shape[d] else 0
    return Line(line.start, tuple(steps))


_FOLLOWED: Mapping[str, Callable[[Any, Sequence[Any]], Line | None]] = {
    "iota": _iota,
    "add": _sum,
    "mul": _product,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": lambda eqn, lines: lines[0],
}
"""Primitive → the integers that it computes."""
