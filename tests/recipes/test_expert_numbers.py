"""Steps in the layouts that shard experts equal those of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from tests.recipes.test_expert_layouts import EXPERTS, WIDTH, dispatched, ragged, shapes


LAYERS = {"ragged": ragged, "dispatched": dispatched}
TAKEN = {"all": range(EXPERTS), "some": (0, 3, 4), "one": (5,)}
"""Experts that tokens are sent to; a second choice goes to one of no score."""


def arguments(tokens: tuple[int, int], taken: str) -> Any:
    rng = np.random.default_rng(len(taken))
    params = {
        k: rng.normal(size=s.shape).astype(np.float32) / 8 for k, s in shapes().items()
    }
    x = rng.normal(size=(*tokens, WIDTH)).astype(np.float32)
    if taken != "all":
        x[..., 0], params["dense"][:, 0] = 1, 0
        params["router"][0] = -40
        params["router"][0, [*TAKEN[taken]]] = 0
    return params, x


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("name", "sizes", "tokens"),
    [
        ("experts", (8,), (16, 13)),
        ("experts", (8,), (15, 7)),
        ("fsdp+experts", (2, 4), (16, 13)),
        ("megatron+experts", (2, 4), (15, 7)),
        ("experts", (2, 2, 2), (16, 13)),
        ("fsdp+experts", (2, 2, 2), (15, 7)),
        ("megatron+experts", (2, 2, 2), (16, 13)),
    ],
)
def test_gradients_and_losses_are_the_same(
    layer: str, name: str, sizes: tuple[int, ...], tokens: tuple[int, int]
) -> None:
    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            y = x + jnp.tanh(x @ p["dense"])
            return jnp.mean(jnp.square(y + LAYERS[layer](p, y)))

        value, grads = jax.value_and_grad(loss)(p)
        return grads, value

    args = arguments(tokens, "all")
    mesh = jax.make_mesh(sizes, tuple("xyz"[: len(sizes)]))
    options: Any = {"hardware": "v5e:2x4", "level": "fast", "progress": False}
    run = rhino.plan(step, *args, mesh=mesh, **options).recipe(name).jit(step)
    for taken in TAKEN:
        args = arguments(tokens, taken)
        rows = args[1] + np.tanh(args[1] @ args[0]["dense"])
        chosen = np.argmax(rows @ args[0]["router"], -1)
        assert {*chosen.flat} <= {*TAKEN[taken]}
        want = jax.jit(step)(*args)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6),
            run(*args),
            want,
        )
