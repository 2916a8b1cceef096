"""Reduce-scatter and all-reduce partial sums of shards, inside `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from rhino_jax.ir.factor import Rule
from rhino_jax.ir.spec import Spec
from rhino_jax.runtime.on_shards.cuts import Cuts


Scatter = tuple[int, tuple[int, ...]]
"""A dim, and the mesh axes over which partial sums are reduce-scattered onto it."""


def partial_axes(rule: Rule, cuts: Cuts) -> tuple[int, ...]:
    """Return the mesh axes over which the only result of an op is a partial sum."""
    summed_factors = [f for f in cuts if rule.partial_results(f)]
    return tuple(sorted(axis for f in summed_factors for axis in cuts[f]))


def scatters_along(
    made: Spec, route: Sequence[Spec], partial: Sequence[int]
) -> tuple[list[Scatter], Spec]:
    """Return the reduce-scatters that take partial sums along a route of specs.

    Args:
      made: spec of the partial sums.
      route: specs that they pass through; the last is the spec of the result.
      partial: mesh axes over which they are partial.
    Returns:
      The reduce-scatters in order, and the spec of the result after them: the last of
      the route, or `made`, without any, where the route shards over other axes than
      those of the sum.
    """
    now, found = made, []
    for spec in route:
        for dim, (before, after) in enumerate(zip(now, spec, strict=True)):
            added = after[len(before) :]
            if after[: len(before)] != before or not set(added) <= set(partial):
                return [], made
            if added:
                found.append((dim, added))
        now = spec
    return found, now


def summed(
    x: Any, scatters: Sequence[Scatter], partial: Sequence[int], names: Sequence[str]
) -> Any:
    """Reduce-scatter a partial sum, and all-reduce it over the axes that remain.

    Args:
      x: a device's partial sum.
      scatters: reduce-scatters of `scatters_along`.
      partial: mesh axes over which it is partial.
      names: names of the mesh axes.
    """
    left = set(partial)
    for dim, axes in scatters:
        over = tuple(names[a] for a in axes)
        x = lax.psum_scatter(x, over, scatter_dimension=dim, tiled=True)
        left -= set(axes)
    return lax.psum(x, tuple(names[a] for a in sorted(left))) if left else x
