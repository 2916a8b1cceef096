"""Donated buffers go to the results that replace the arguments."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rhino_jax as rhino
from tests.runtime.stand_in import normal


_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}, \w+-alias\)")


def aliases(text: str) -> dict[int, int]:
    """Return argument → place of the result that takes its buffer, from HLO."""
    header = text.partition("\n")[0]
    return {int(arg): int(result or 0) for result, arg in _ALIAS.findall(header)}


def step(params: Any, momentum: Any, x: Any) -> Any:
    """Return a gradient, which is no state, before the state in another order."""
    gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(params)
    momentum = 0.9 * momentum + gradient
    params = params - 0.1 * momentum
    return {"gradient": gradient, "momentum": momentum, "params": params}


def test_state_takes_its_own_buffer() -> None:
    arrays = normal(0, 64, 64), normal(1, 64, 64), normal(2, 32, 64)
    wanted = jax.jit(step)(*arrays)
    sharded = rhino.auto_shard(
        step, donate_argnums=(0, 1), mesh=jax.make_mesh((8,), "x")
    )
    compiled = sharded.lower(*arrays).compile()
    # Keys are sorted: the third result replaces the first argument.
    order = sharded.bound(*arrays).executable.order
    found = {i: order[place] for i, place in aliases(compiled.as_text()).items()}
    assert found == {0: 2, 1: 1}
    plan = sharded.plan(*arrays)
    for run in (compiled, sharded):
        got = run(plan.put(arrays[0]), arrays[1].copy(), arrays[2])
        for name in wanted:
            np.testing.assert_allclose(got[name], wanted[name], rtol=1e-5, atol=1e-6)


def test_results_stay_in_their_places_where_buffers_fit() -> None:
    def train(params: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(params)
        return loss, params - 0.1 * gradient

    sharded = rhino.auto_shard(train, donate_argnums=0, mesh=jax.make_mesh((8,), "x"))
    assert sharded.bound(normal(0, 64, 64), normal(2, 32, 64)).executable.order == [
        0,
        1,
    ]
