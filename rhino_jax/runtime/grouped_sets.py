"""Grouped matmuls on shards: one product for each part of the group sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rhino_jax._compat import bind_eqn, hide_frames
from rhino_jax.frontend.rules.dot import prefix_dims


hide_frames(__file__)


def each_set(eqn: Any, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Run a grouped matmul, for each set of group sizes by itself.

    Compilers' kernels are of one set (`jax.lax.ragged_dot`); each shard mostly has one.

    Args:
      eqn: the `ragged_dot_general`.
      args: a shard of its operands.
      params: its parameters.
    """
    lhs, rhs, sizes = args
    dims = params["ragged_dot_dimension_numbers"]
    if sizes.ndim == 1:
        return bind_eqn(eqn, args, params)
    contract, batch = dims.dot_dimension_numbers
    outer = prefix_dims(dims)
    pairs = dict(zip((*batch[0], *contract[0]), (*batch[1], *contract[1]), strict=True))
    paired = [pairs.get(d) for d in outer]
    gone = outer, [d for d in paired if d is not None]

    def left(of: Sequence[int], side: int) -> tuple[int, ...]:
        return tuple(
            d - sum(g < d for g in gone[side]) for d in of if d not in gone[side]
        )

    new = lax.RaggedDotDimensionNumbers(
        (tuple(left(c, i) for i, c in enumerate(contract)), ((), ())),
        left(dims.lhs_ragged_dimensions, 0),
        left(dims.rhs_group_dimensions, 1),
    )
    alone = {**params, "ragged_dot_dimension_numbers": new}

    def one(index: Sequence[int]) -> Any:
        at = dict(zip(outer, index, strict=True))
        beside = {d: i for d, i in zip(paired, index, strict=True) if d is not None}
        return bind_eqn(eqn, [_at(lhs, at), _at(rhs, beside), sizes[index]], alone)[0]

    shape = sizes.shape[:-1]
    made = [one(index) for index in np.ndindex(*shape)]
    num_batch = len(batch[0])
    if dims.rhs_group_dimensions:
        return [jnp.reshape(jnp.stack(made), (*shape, *made[0].shape))]
    if num_batch == 0:
        return [sum(made[1:], made[0])]
    stacked = jnp.reshape(jnp.stack(made), (*shape, *made[0].shape))
    summed = jnp.sum(stacked, axis=tuple(range(num_batch, len(shape))))
    return [jnp.moveaxis(summed, num_batch, 0)]


def _at(x: Any, index: Mapping[int, int]) -> Any:
    """Return an array at some indices of some dims."""
    return x[tuple(index.get(d, slice(None)) for d in range(x.ndim))]
