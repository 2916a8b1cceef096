"""Equations run on a stage's part of stacks of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import bind_eqn, eqn_context, hide_frames
from rhino_jax.frontend.registry import local_params
from rhino_jax.passes.spmd_pipeline.along import Stacked


hide_frames(__file__)


def run_local(
    eqn: Any, stacked: Stacked, args: Sequence[Any], stage: Any, stages: int
) -> list[Any]:
    """Run an equation on this stage's layers.

    Args:
      eqn: the equation.
      stacked: dims of its operands and results that are over layers.
      args: its operands; stacks are this stage's part, others are whole.
      stage: index of this stage, traced.
      stages: number of stages.
    """
    whole = [tuple(v.aval.shape) for v in eqn.invars]
    given = [
        part(x, d, stage, stages) if d != -1 and jnp.shape(x) == shape else x
        for x, d, shape in zip(args, stacked.dims, whole, strict=True)
    ]
    shapes = []
    for var, d in zip(eqn.outvars, stacked.results, strict=True):
        shape = list(var.aval.shape)
        if d != -1:
            shape[d] //= stages
        shapes.append(tuple(shape))
    params = local_params(
        eqn.primitive.name, eqn.params, [tuple(jnp.shape(x)) for x in given], shapes
    )
    with eqn_context(eqn):
        return bind_eqn(eqn, given, params)


def part(x: Any, dim: int, stage: Any, stages: int) -> Any:
    """Return this stage's part of a whole array."""
    size = x.shape[dim] // stages
    return lax.dynamic_slice_in_dim(x, stage * size, size, dim)
