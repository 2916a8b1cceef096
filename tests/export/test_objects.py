"""The code of plans with objects of Flax NNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino


nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")


def make() -> Any:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu)
    model.layers.append(nnx.Linear(128, 64, rngs=rngs))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def step(model: Any, opt: Any, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
    opt.update(model, grads)
    return loss


@pytest.mark.parametrize("style", ["nnx", "specs"])
def test_objects_are_placed_and_trained(style: str) -> None:
    x = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    pins = {"model.layers[0].kernel": jax.P(None, "model")}
    mesh = {"data": 4, "model": 2}
    plan = rhino.plan(step, *make(), x, mesh=mesh, pins=pins, progress=False)
    found: dict[str, Any] = {}
    exec(plan.code(style), found)
    model, opt = make()
    model_specs, opt_specs, x_specs = (found[n] for n in ("MODEL", "OPT", "X"))
    if style == "nnx":
        model_specs, opt_specs, x_specs = (
            found["to_mesh"](s) for s in (model_specs, opt_specs, x_specs)
        )
    found["place"](model, model_specs)
    found["place"](opt, opt_specs)
    kernel = model.layers[0].kernel[...]
    assert kernel.sharding.spec == jax.P(None, "model")
    with jax.set_mesh(found["mesh"]):
        loss = nnx.jit(step)(model, opt, found["place"](x, x_specs))
    np.testing.assert_allclose(loss, nnx.jit(step)(*make(), x), rtol=1e-4)
