"""Merge top-k, arg-max and cumulative results of shards along a dim, in `shard_map`.

Each shard computes a few results of its own, all-gathers those of the others, and
merges them. XLA gathers the whole dim for most of these ops.

Shards are merged in the order of their positions, so that of equal elements the first
counts, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import bind_eqn
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.runtime.on_shards.cuts import Cuts
from rhino_jax.runtime.on_shards.halo import Shards


Merged = Callable[[Any, int, Sequence[str], Any], list[Any]]
"""Function of (equation, dim, names of the mesh axes that shard it, shard): results."""

_RECALLED_OF = "reduction_input_size_override"
"""Parameter of an approximate top-k: size that its recall is of; negative: its own."""


def merged_axes(rule: Rule, cuts: Cuts) -> tuple[int, tuple[int, ...]] | None:
    """Return the first operand's dim that is merged, and the mesh axes that shard it.

    None where no such dim is sharded.
    """
    for d, dim in enumerate(rule.operands[0] if rule.operands else ()):
        for f in dim:
            if rule.factors[f].kind is FactorKind.MERGE and f in cuts:
                return d, cuts[f]
    return None


def _top_k(eqn: Any, dim: int, names: Sequence[str], x: Any) -> list[Any]:
    """Return the top-k of all shards' top-k."""
    k, width = eqn.params["k"], x.shape[dim]
    params = {**eqn.params, "k": min(k, width)}
    if params.get(_RECALLED_OF, 0) < 0:
        params[_RECALLED_OF] = width * Shards(names).count
    best, at = bind_eqn(eqn, [x], params)
    best, at = _candidates(best, at, dim, names, width)
    if params.get("is_max_k", True):
        order = lax.top_k(best, k, axis=dim)[1]
    else:
        order = lax.slice_in_dim(jnp.argsort(best, axis=dim), 0, k, axis=dim)
    return [jnp.take_along_axis(y, order, dim) for y in (best, at)]


def _position(eqn: Any, dim: int, names: Sequence[str], x: Any) -> list[Any]:
    """Return the arg-max (or arg-min) of all shards' best elements."""
    find, best_of = {
        "argmax": (jnp.argmax, jnp.max),
        "argmin": (jnp.argmin, jnp.min),
    }[eqn.primitive.name]
    (at,) = bind_eqn(eqn, [x], eqn.params)
    best = jnp.expand_dims(best_of(x, dim), dim)
    best, at = _candidates(best, jnp.expand_dims(at, dim), dim, names, x.shape[dim])
    first = find(best, dim, keepdims=True)
    return [jnp.squeeze(jnp.take_along_axis(at, first, dim), dim)]


def _candidates(
    best: Any, at: Any, dim: int, names: Sequence[str], width: int
) -> tuple[Any, Any]:
    """Return the best elements of all shards along `dim` and their global positions."""
    at = at + (Shards(names).position() * width).astype(at.dtype)
    return _gathered(best, dim, names), _gathered(at, dim, names)


def _running(eqn: Any, dim: int, names: Sequence[str], x: Any) -> list[Any]:
    """Return a shard's cumulative results, continued from the shards before it."""
    is_reversed, shards = eqn.params["reverse"], Shards(names)
    (own,) = bind_eqn(eqn, [x], eqn.params)
    end = 0 if is_reversed else own.shape[dim] - 1
    last = _gathered(lax.slice_in_dim(own, end, end + 1, axis=dim), dim, names)
    (total,) = bind_eqn(eqn, [last], eqn.params)
    position = shards.position()
    before = position + 1 if is_reversed else position - 1
    at = jnp.clip(before, 0, shards.count - 1)
    found = lax.dynamic_slice_in_dim(total, at, 1, axis=dim)
    return [jnp.where(before == at, _ADDED[eqn.primitive.name](own, found), own)]


def _gathered(x: Any, dim: int, names: Sequence[str]) -> Any:
    return lax.all_gather(x, tuple(names), axis=dim, tiled=True)


_ADDED: Mapping[str, Callable[[Any, Any], Any]] = {
    "cumsum": jnp.add,
    "cumprod": jnp.multiply,
    "cummax": jnp.maximum,
    "cummin": jnp.minimum,
    "cumlogsumexp": jnp.logaddexp,
}

MERGED: Mapping[str, Merged] = {
    "top_k": _top_k,
    "approx_top_k": _top_k,
    "argmax": _position,
    "argmin": _position,
    **dict.fromkeys(_ADDED, _running),
}
"""Primitive → the function that merges shards of a MERGE factor."""
