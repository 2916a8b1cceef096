"""Steps of the zoo, traced once, their arguments, and both ways to run a jaxpr."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rhino_jax._compat import jaxpr_consts, open_jaxpr
from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.models import registry
from rhino_jax.models.workload import Workload


def compiled(closed: Any, arrays: Sequence[Any]) -> list[Any]:
    """Run a closed jaxpr as XLA compiles it; `interpret` runs it without compiling."""
    opened, consts = open_jaxpr(closed), jaxpr_consts(closed)
    return jax.jit(lambda xs: jax.core.eval_jaxpr(opened, consts, *xs))([*arrays])


def arguments_of(workload: Workload) -> tuple[Any, ...]:
    """Return random arguments of a workload's step, as NumPy arrays: scales near one,
    statistics positive, and an optimizer's state zero."""
    rng = np.random.default_rng(0)

    def draw(position: int, path: Any, x: Any) -> Any:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jax.dtypes.issubdtype(x.dtype, np.floating):
            return rng.integers(0, 16, x.shape).astype(x.dtype) if is_batch else zero(x)
        if is_batch:
            return rng.normal(size=x.shape).astype(x.dtype)
        if position == 1:
            return zero(x)
        if position == 2:
            return rng.uniform(0.5, 1.5, x.shape).astype(x.dtype)
        mean = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return rng.normal(mean, 0.15, x.shape).astype(x.dtype)

    def zero(x: Any) -> Any:
        return np.zeros(x.shape, x.dtype)

    args, made = workload.abstract_args(), []
    for position, arg in enumerate(args):
        is_batch = position == len(args) - 1
        made.append(
            jax.tree_util.tree_map_with_path(functools.partial(draw, position), arg)
        )
    return tuple(made)


def random_like(shapes: Any, scale: float = 0.25) -> Any:
    """Return random float32 arrays of these shapes, as NumPy arrays."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: (scale * rng.normal(size=x.shape)).astype(np.float32), shapes
    )


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, np.float32)


@functools.cache
def of_zoo(name: str, **overrides: Any) -> tuple[Traced, list[Any]]:
    """Return a workload's step, traced for fed-back arguments, and its arrays.

    By default with SGD: AdamW makes noise of gradients that are exactly zero.
    """
    if "decode" not in name:
        overrides = {"optimizer": "sgd", **overrides}
    workload = registry.get(name, **overrides)
    args = arguments_of(workload)
    traced = trace(workload.step, args, {}, donate_argnums=workload.donate_argnums)
    return traced, jax.tree.leaves(args)
