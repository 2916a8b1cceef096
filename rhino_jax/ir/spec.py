"""Specs: how the dims of a value are laid out over mesh axes.

A `Spec` holds, for every dim, the mesh axes (by position in the mesh) that shard it,
major to minor: `((0,), (), (1, 2))` is `PartitionSpec('x', None, ('y', 'z'))` on a mesh
with axes x, y, z. This module knows neither JAX nor hardware.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any


Spec = tuple[tuple[int, ...], ...]

OpenSpec = tuple[tuple[int, ...] | None, ...]
"""A spec in which some dims, None, are left open."""


def is_within(spec: Spec, open_spec: OpenSpec) -> bool:
    """Whether a spec agrees with an open one in all dims that are not left open."""
    return len(spec) == len(open_spec) and all(
        wanted is None or have == wanted
        for have, wanted in zip(spec, open_spec, strict=True)
    )


def entry_axes(entry: Any) -> tuple[Any, ...]:
    """Return the mesh axes in an entry of a PartitionSpec: a name, several, or None."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def replicated(rank: int) -> Spec:
    """Return the spec of a replicated value with `rank` dims."""
    return ((),) * rank


def axes_of(spec: Spec) -> frozenset[int]:
    """Return all mesh axes that shard some dim of `spec`."""
    return frozenset(axis for dim in spec for axis in dim)


def without(spec: Spec, axes: Collection[int]) -> Spec:
    """Return the spec without the given mesh axes."""
    return tuple(tuple(a for a in dim if a not in axes) for dim in spec)


def num_shards(axes: Iterable[int], sizes: Sequence[int]) -> int:
    """Return the number of shards over some mesh axes, for mesh axes of these
    `sizes`."""
    return math.prod(sizes[a] for a in axes)


@functools.lru_cache(maxsize=1 << 16)
def shards_per_dim(spec: Spec, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of shards of each dim, for mesh axes of these `sizes`."""
    return tuple(num_shards(dim, sizes) for dim in spec)


def is_even(spec: Spec, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether every sharded dim divides evenly."""
    return all(
        d % n == 0
        for d, n in zip(shape, shards_per_dim(spec, tuple(sizes)), strict=True)
    )


def even_part(spec: Spec, shape: Sequence[int], sizes: Sequence[int]) -> Spec:
    """Return the spec with the first axes of every dim that divide it evenly."""
    found = []
    for dim, size in zip(spec, shape, strict=True):
        count = len(dim)
        while size % num_shards(dim[:count], sizes):
            count -= 1
        found.append(dim[:count])
    return tuple(found)


@functools.lru_cache(maxsize=1 << 16)
def share_of(spec: Spec, shape: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """Return the share of a value that one device holds, in (0, 1]; where a dim does
    not divide evenly, including the padding that makes all shards as large as the
    largest."""
    return math.prod(
        -(-d // n) / d if d else 1.0 / n
        for d, n in zip(shape, shards_per_dim(spec, sizes), strict=True)
    )


def padding_of(spec: Spec, shape: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """Return the factor by which padding of uneven shards enlarges a value; 1 where all
    dims divide evenly."""
    pieces = shards_per_dim(spec, sizes)
    return math.prod(
        -(-d // n) * n / d for d, n in zip(shape, pieces, strict=True) if d
    )


def local_shape(
    spec: Spec, shape: Sequence[int], sizes: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of one device's shard, rounded up where a dim does not divide
    evenly."""
    return tuple(
        -(-d // n)
        for d, n in zip(shape, shards_per_dim(spec, tuple(sizes)), strict=True)
    )


def axes_text(axes: Iterable[tuple[str, int]], between: str = ", ") -> str:
    """Format the axes of a mesh, as `data=4, model=2`."""
    return between.join(f"{name}={size}" for name, size in axes) or "no axes"


def format_spec(spec: OpenSpec, names: Sequence[str]) -> str:
    """Format a spec as `P('x', None, ('y', 'z'))`, trailing Nones dropped."""
    parts: list[str] = []
    for dim in spec:
        if dim is None:
            parts.append("UNCONSTRAINED")
        elif not dim:
            parts.append("None")
        elif len(dim) == 1:
            parts.append(repr(names[dim[0]]))
        else:
            parts.append("(" + ", ".join(repr(names[a]) for a in dim) + ")")
    while parts and parts[-1] == "None":
        parts.pop()
    return "P(" + ", ".join(parts) + ")"
