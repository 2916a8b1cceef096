"""Which inputs of a step are data, and which of their dims holds the batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.analysis.roles import data_inputs
from rhino_jax.frontend.trace import trace


N = 4  # rows, features, layers: all of one size


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


W = {"w": shaped(N, N), "b": shaped(N)}
X, T = shaped(N, N), shaped(N, dtype=jnp.int32)


def net(w: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w["w"] + w["b"])


def of_torch(layers: Any, x: jax.Array) -> jax.Array:
    for w in layers:
        x = jnp.tanh(x @ w["w"].T + w["b"])
    return x


def trained(loss: Any) -> Any:
    """A step of gradient descent on the loss of its first argument."""

    def step(w: Any, second: Any, third: Any) -> Any:
        return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w, second, third))

    return step


def distilled(w: Any, teacher: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((net(w, x)[:, :1] - of_torch(teacher, x)[:, :1]) ** 2)


def adapted(adapter: Any, base: Any, x: jax.Array) -> jax.Array:
    w = base["w"] + adapter["a"] @ adapter["b"]
    return jnp.mean(net({**base, "w": w}, x) ** 2)


def with_class_weights(w: Any, x: jax.Array, of_class: jax.Array) -> jax.Array:
    return jnp.mean(net(w, x) * of_class)


def decode(w: Any, state: Any) -> Any:
    def layer(x: jax.Array, wc: Any) -> Any:
        w, cache = wc
        cache = cache.at[:, 1].set(x @ w)
        return x + jnp.einsum("bd,bsd->bs", x, cache) @ cache.mean(0), cache

    x = w["table"][state["token"]]
    x, cache = jax.lax.scan(layer, x, (w["layers"], state["cache"]))
    return {"token": (x @ w["table"].T).argmax(-1), "cache": cache}


def test_a_step_that_draws_its_batch_has_no_data() -> None:
    def step(w: Any, key: jax.Array) -> Any:
        g = jax.grad(lambda w: jnp.mean(net(w, jax.random.normal(key, (N, N)))))(w)
        return jax.tree.map(lambda w, g: w - g, w, g), jax.random.split(key)[0]

    args = W, jax.random.PRNGKey(0)
    assert data_inputs(trace(step, args, {}, donate_argnums=(0, 1)).program) == {}


STATE = {"token": T, "cache": shaped(N, N, N, N)}
ADAPTER = {"a": shaped(N, 2), "b": shaped(2, N)}
CASES = {
    "distillation": (trained(distilled), (W, [W, W], X), (0,), {"third": 0}),
    "nothing is fed back": (distilled, (W, [W, W], X), (), {"x": 0}),
    "adapters": (trained(adapted), (ADAPTER, W, X), (0,), {"third": 0}),
    "a donated batch": (trained(adapted), (ADAPTER, W, X), (0, 2), {"third": 0}),
    "weights of classes": (
        trained(with_class_weights),
        (W, X, shaped(N)),
        (0,),
        {"second": 0, "third": None},
    ),
    "decoding": (
        decode,
        ({"table": shaped(N, N), "layers": shaped(N, N, N)}, STATE),
        (1,),
        {"state['cache']": 1, "state['token']": 0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_data_and_their_batch_dims(name: str) -> None:
    step, args, donate, expected = CASES[name]
    program = trace(step, args, {}, donate_argnums=donate).program
    found = data_inputs(program)
    dims = {program.inputs[i].path: at and at.dim for i, at in found.items()}
    assert dims == expected
