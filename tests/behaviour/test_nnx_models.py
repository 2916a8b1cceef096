"""Models and steps in the style of Flax NNX's own examples, beside `nnx.jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rhino_jax as rhino
from tests.behaviour.test_nnx_objects import assert_close, nnx, sharded, states


SGD = optax.sgd(0.1, momentum=0.9)


class Block(nnx.Module):
    def __init__(self, dim: int, rngs: Any) -> None:
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, dim, deterministic=False, dropout_rate=0.1, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(dim, 2 * dim, rngs=rngs)
        self.down = nnx.Linear(2 * dim, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Transformer(nnx.Module):
    """Embedding and head are one weight; layers in a list, or stacked and scanned."""

    def __init__(self, is_scanned: bool, rngs: Any) -> None:
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.is_scanned = is_scanned
        if is_scanned:
            make = nnx.vmap(functools.partial(Block, 16), in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=2)(make)(rngs)
        else:
            self.blocks = nnx.List([Block(16, rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        if self.is_scanned:
            run = nnx.scan(
                lambda x, block: block(x),
                in_axes=(nnx.Carry, 0),
                out_axes=nnx.Carry,
            )
            return self.embed.attend(run(x, self.blocks))
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return self.embed.attend(x)


def language_model(model: Any, optimizer: Any, tokens: jax.Array) -> jax.Array:
    def loss(model: Any) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def transformer(is_scanned: bool) -> Any:
    model = Transformer(is_scanned, nnx.Rngs(0, dropout=1))
    tokens = jax.random.randint(jax.random.key(2), (8, 9), 0, 32)
    return model, nnx.Optimizer(model, SGD, wrt=nnx.Param), tokens


class Mlp(nnx.Module):
    def __init__(self, inner: int, outer: int, rngs: Any, rate: float = 0.2) -> None:
        self.first = nnx.Linear(inner, 32, rngs=rngs)
        self.last = nnx.Linear(32, outer, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(nnx.tanh(self.first(x))))


def gan() -> Any:
    models = {"g": Mlp(8, 16, nnx.Rngs(0)), "d": Mlp(16, 1, nnx.Rngs(1))}
    make = functools.partial(nnx.Optimizer, tx=SGD, wrt=nnx.Param)
    optimizers = {name: make(model) for name, model in models.items()}
    return models, optimizers, nnx.Rngs(7), jnp.ones((16, 16))


def adversarial(models: Any, optimizers: Any, rngs: Any, x: jax.Array) -> Any:
    noise = jax.random.normal(rngs(), (16, 8))

    def of_d(d: Any, g: Any) -> jax.Array:
        return (nnx.softplus(-d(x)) + nnx.softplus(d(g(noise)))).mean()

    def of_g(g: Any, d: Any) -> jax.Array:
        return nnx.softplus(-d(g(noise))).mean()

    loss_d, grads = nnx.value_and_grad(of_d)(models["d"], models["g"])
    optimizers["d"].update(models["d"], grads)
    loss_g, grads = nnx.value_and_grad(of_g)(models["g"], models["d"])
    optimizers["g"].update(models["g"], grads)
    return loss_d, loss_g


def averaged() -> Any:
    model = Mlp(16, 16, nnx.Rngs(0), rate=0.0)
    optimizer = nnx.Optimizer(model, optax.MultiSteps(SGD, 2), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    return model, nnx.clone(model), optimizer, metrics, jnp.ones((16, 16))


def average(model: Any, ema: Any, optimizer: Any, metrics: Any, x: jax.Array) -> None:
    def loss(model: Any) -> jax.Array:
        return jnp.mean((model(x) - x) ** 2)

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    metrics.update(loss=value)
    new, old = nnx.state(model, nnx.Param), nnx.state(ema, nnx.Param)
    nnx.update(ema, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, old, new))


class Recurrent(nnx.Module):
    """Carries its last state from call to call."""

    def __init__(self, rngs: Any) -> None:
        self.rnn = nnx.RNN(nnx.GRUCell(8, 16, rngs=rngs))
        self.last = nnx.Cache(jnp.zeros((16, 16)))

    def __call__(self, x: jax.Array) -> jax.Array:
        out = self.rnn(x)
        self.last[...] = 0.5 * self.last[...] + out[:, -1]
        self.sow(nnx.Intermediate, "norm", (out**2).sum())
        return out + self.last[...][:, None]


def recurrent() -> Any:
    model = Recurrent(nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (16, 4, 8))
    return model, nnx.Optimizer(model, SGD, wrt=nnx.Param), x


def unroll(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    def loss(model: Any) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    nnx.pop(model, nnx.Intermediate)
    return value


STEPS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "transformer": (lambda: transformer(False), language_model),
    "scanned transformer": (lambda: transformer(True), language_model),
    "two models": (gan, adversarial),
    "average of weights": (averaged, average),
    "recurrent": (recurrent, unroll),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_as_under_nnx_jit(name: str) -> None:
    make, step = STEPS[name]
    (*got, x), (*expected, _) = make(), make()
    fn, single = sharded(step), nnx.jit(step)
    for _ in range(3):
        assert_close(fn(*got, x), single(*expected, x))
    assert_close(states(*got), states(*expected))


def test_what_a_call_adds_changes_and_returns() -> None:
    def step(model: Any, x: jax.Array) -> Any:
        model.twice = nnx.Param(model.first.kernel[...] * 2)
        model.tag = "seen"
        model.sow(nnx.Intermediate, "sum", x.sum())
        fresh = nnx.Linear(8, 8, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(3))
        return model, fresh, nnx.state(model, nnx.Param)

    got, expected = Mlp(8, 8, nnx.Rngs(0)), Mlp(8, 8, nnx.Rngs(0))
    model, fresh, params = sharded(step)(got, jnp.ones((8, 8)))
    other, also, _ = nnx.jit(step)(expected, jnp.ones((8, 8)))
    assert model is got
    assert got.tag == "seen"
    assert_close(states(model, fresh), states(other, also))
    assert params["twice"] is got.twice


def test_a_method_is_planned_with_its_object() -> None:
    class Counter(nnx.Module):
        def __init__(self) -> None:
            self.calls = nnx.Variable(jnp.zeros(8))

        @sharded
        def step(self, x: jax.Array) -> jax.Array:
            self.calls[...] += x
            return self.calls[...].sum()

    counter = Counter()
    assert float(counter.step(jnp.ones(8))) == 8.0
    assert float(counter.step(jnp.ones(8))) == 16.0
    assert [leaf.path for leaf in counter.step.plan(jnp.ones(8)).inputs] == [
        "self.calls",
        "x",
    ]


def test_frozen_weights_are_kept_even_if_they_are_donated() -> None:
    def step(model: Any, x: jax.Array) -> jax.Array:
        model.bias[...] += 1
        return model(x)

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])
    fn = sharded(nnx.jit(step, donate_argnums=0))
    for _ in range(2):
        fn(model, jnp.ones((8, 8)))
    np.testing.assert_array_equal(model.kernel[...], kernel)
    np.testing.assert_array_equal(model.bias[...], np.full(8, 2.0))


def test_a_bare_state_is_a_pytree() -> None:
    def step(state: Any, graphdef: Any) -> Any:
        model = nnx.merge(graphdef, state)
        model.kernel[...] *= 2
        return nnx.state(model)

    graphdef, state = nnx.split(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    before = np.asarray(state["kernel"][...])
    fn = sharded(step, static_argnums=1)
    np.testing.assert_array_equal(fn(state, graphdef)["kernel"][...], before * 2)
    np.testing.assert_array_equal(state["kernel"][...], before)
    paths = [leaf.path for leaf in fn.plan(state, graphdef).inputs]
    assert paths == ["state['bias']", "state['kernel']"]


@pytest.mark.slow
def test_plans_of_abstract_objects_are_kept_and_applied(tmp_path: Any) -> None:
    def make() -> Any:
        model = Mlp(16, 16, nnx.Rngs(0), rate=0.0)
        return model, nnx.Optimizer(model, SGD, wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return jnp.mean(x)

    x = jnp.ones((16, 16))
    shapes = (*nnx.eval_shape(make), jax.ShapeDtypeStruct(x.shape, x.dtype))
    fn = sharded(step)
    mesh = {"x": 4, "y": 2}
    plan = rhino.plan(step, *shapes, mesh=mesh, hardware="v5e", level="fast")
    assert plan.fingerprint == fn.plan(*make(), x).fingerprint
    assert fn.eval_shape(*shapes).shape == ()
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.in_specs[0]["first"] == dict(plan.in_specs[0]["first"])
    expected = make()
    nnx.jit(step)(*expected, x)
    for run in (loaded.jit(step), fn.lower(*shapes).compile()):
        got = make()
        run(*got, x)
        assert_close(states(*got), states(*expected))
    assert plan.verify(step, *shapes, compile_for="cpu").ok


def test_under_jit_and_grad_objects_are_those_of_outside() -> None:
    fn = sharded(lambda model, x: model(x).sum())
    model, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((8, 8))
    assert_close(fn(model, x), model(x).sum())
    assert_close(jax.jit(lambda model, x: fn(model, x))(model, x), model(x).sum())
    grads = nnx.grad(lambda model: fn(model, x))(model)
    np.testing.assert_allclose(grads["bias"][...], np.full(8, 8.0))
    partial = nnx.cached_partial(fn, model)
    assert_close(partial(x), model(x).sum())
