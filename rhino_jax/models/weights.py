"""Descriptions of parameters, and their initialization.

A model describes its parameters as a tree of `Weight`s; `draw` turns such a tree
into arrays. So no model splits keys, and a description of a large model is cheap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp


# A random draw costs more compile time than a layer, so small weights share one; larger
# ones are drawn separately, so that they can be created sharded.
_SHARED_BELOW = 2**20


@dataclass(frozen=True, slots=True)
class Weight:
    """A float32 array of independent normal numbers; constant if `std` is 0.

    Attributes:
      shape: its shape.
      std, mean: standard deviation and mean.
    """

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def normal(*shape: int, fan_in: int = 0) -> Weight:
    """Return a weight of variance 1 / fan_in; 0: all dims but the last, multiplied."""
    return Weight(shape, (fan_in or math.prod(shape[:-1])) ** -0.5)


def zeros(*shape: int) -> Weight:
    return Weight(shape, 0.0)


def ones(*shape: int) -> Weight:
    return Weight(shape, 0.0, 1.0)


def norm(d_model: int) -> dict[str, Weight]:
    """Return scale and bias of a LayerNorm: [D] each."""
    return {"scale": ones(d_model), "bias": zeros(d_model)}


def stack(block: Any, num_layers: int, layers: str) -> Any:
    """Return the weights of equal blocks.

    Args:
      block: one block's tree of weights.
      num_layers: number of blocks.
      layers: "scan" gives every weight a leading dim of `num_layers`; "unroll" makes a
        tuple of the blocks' trees.
    """
    if layers == "unroll":
        return (block,) * num_layers
    return jax.tree.map(lambda w: replace(w, shape=(num_layers, *w.shape)), block)


def draw(tree: Any, key: jax.Array) -> Any:
    """Return the arrays that a tree of weights describes."""
    weights, structure = jax.tree.flatten(tree)
    shared_key, own_key = jax.random.split(key)
    sizes = [math.prod(w.shape) for w in weights]
    shares = [
        w.std > 0 and size < _SHARED_BELOW
        for w, size in zip(weights, sizes, strict=True)
    ]
    total = sum(size for size, shared in zip(sizes, shares, strict=True) if shared)
    pool = jax.random.normal(shared_key, (total,), jnp.float32)
    start, arrays = 0, []
    for i, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        if not weight.std:
            arrays.append(jnp.full(weight.shape, weight.mean, jnp.float32))
            continue
        if shares[i]:
            noise = pool[start : start + size].reshape(weight.shape)
            start += size
        else:
            noise = jax.random.normal(
                jax.random.fold_in(own_key, i), weight.shape, jnp.float32
            )
        arrays.append(weight.mean + weight.std * noise)
    return jax.tree.unflatten(structure, arrays)
