"""Exchange halos between neighbouring shards of a dim, as stencils and windows read.

A halo has the elements beyond its own shard that a stencil, window, pad or roll reads.
Inside `shard_map`. A dim of `n · width` elements has `n` shards along one or several
mesh axes. A shard receives as many elements of the shards before and after it as it
reads, with one `ppermute` per neighbour, and no more than that is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def with_halo(
    x: jax.Array,
    dim: int,
    lower: int,
    upper: int,
    axes: Sequence[str],
    *,
    edge: Any = None,
    wraps: bool = False,
) -> jax.Array:
    """Return a shard with its halo: elements of its neighbours before and after.

    Args:
      x: this device's shard, of `width` elements along `dim`.
      dim: the sharded dim.
      lower, upper: halo sizes before the first and after the last element; more than
        `width` come from several neighbours.
      axes: names of the mesh axes that shard the dim, major first.
      edge: scalar beyond the ends of the whole dim; None for zero.
      wraps: whether the first shard follows the last, as in a roll; `edge` is not used
        then.
    Returns:
      `x`, with `lower + width + upper` elements along `dim`.
    """
    shards = Shards(axes)
    below = _received(x, dim, lower, 1, shards, edge, wraps)
    above = _received(x, dim, upper, -1, shards, edge, wraps)
    parts = [*reversed(below), x, *above]
    return lax.concatenate(parts, dim) if len(parts) > 1 else x


class Shards:
    """The devices along which a dim is sharded, by the position of their shards.

    Args:
      axes: names of the mesh axes, major first.
    """

    def __init__(self, axes: Sequence[str]) -> None:
        self.axes = tuple(axes)
        self.sizes = [lax.axis_size(name) for name in self.axes]
        self.count = math.prod(self.sizes)
        # JAX 0.10.2's `ppermute` numbers devices in the order of the mesh, whatever the
        # order of its axis names.
        names = jax.sharding.get_abstract_mesh().axis_names
        self._in_mesh = sorted(
            range(len(self.axes)), key=lambda i: names.index(axes[i])
        )

    def position(self) -> jax.Array:
        """Return the position of this device's shard."""
        found: Any = 0
        for name, size in zip(self.axes, self.sizes, strict=True):
            found = found * size + lax.axis_index(name)
        return found

    def shifted(self, x: jax.Array, by: int, *, wraps: bool = False) -> jax.Array:
        """Return the array of the device whose shard is `by` positions before this one.

        Zeros where there is none, unless `wraps`.
        """
        pairs = [
            (self._device(i), self._device((i + by) % self.count))
            for i in range(self.count)
            if wraps or 0 <= i + by < self.count
        ]
        names = tuple(self.axes[i] for i in self._in_mesh)
        return lax.ppermute(x, names, pairs) if pairs else jnp.zeros_like(x)

    def _device(self, position: int) -> int:
        """Return the position of a shard's device in the order of the mesh."""
        at: list[int] = []
        for size in reversed(self.sizes):
            position, place = divmod(position, size)
            at.insert(0, place)
        number = 0
        for i in self._in_mesh:
            number = number * self.sizes[i] + at[i]
        return number


def _received(
    x: jax.Array,
    dim: int,
    count: int,
    direction: int,
    shards: Shards,
    edge: Any,
    wraps: bool,
) -> list[jax.Array]:
    """Return the halo parts of the neighbours on one side, nearest first.

    Args:
      x, dim, edge, wraps: as for `with_halo`.
      count: number of halo elements.
      direction: 1 from shards before this one, -1 from those after it.
      shards: the devices of the sharded dim.
    """
    parts, width, distance = [], x.shape[dim], 0
    while count > 0:
        distance += 1
        taken = min(count, width)
        count -= taken
        start = width - taken if direction > 0 else 0
        border = lax.slice_in_dim(x, start, start + taken, axis=dim)
        border = shards.shifted(border, direction * distance, wraps=wraps)
        if edge is not None and not wraps:
            source = shards.position() - direction * distance
            is_inside = (source >= 0) & (source < shards.count)
            border = jnp.where(is_inside, border, jnp.asarray(edge, x.dtype))
        parts.append(border)
    return parts
