"""Flax NNX objects as arguments: the same numbers as under `nnx.jit`, call by call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rhino_jax as rhino
from tests.behaviour.compare import mesh_of
from tests.cases import covering


nnx = pytest.importorskip("flax.nnx")


class Net(nnx.Module):
    """Dropout, BatchNorm and a weight that is used twice."""

    def __init__(self, rngs: Any) -> None:
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(32, 16, rngs=rngs)
        self.tied = self.first

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.drop(nnx.relu(self.norm(self.first(x))))
        return self.last(h) + self.tied.bias.get_value()[:16]


def make(optimizer: Any = None) -> tuple[Any, Any]:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optimizer or optax.adam(1e-2), wrt=nnx.Param)


def train(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    def loss(model: Any) -> jax.Array:
        return jnp.mean((model(x) - x) ** 2)

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (32, 16))


def states(*objects: Any) -> Any:
    pure = nnx.to_pure_dict(nnx.state(list(objects)))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, pure)


def assert_close(got: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
        got,
        expected,
    )


def sharded(fn: Callable[..., Any], **options: Any) -> Any:
    return rhino.auto_shard(
        fn,
        mesh=mesh_of((4, 2)),
        hardware="v5e",
        level="fast",
        progress=False,
        **options,
    )


@cache
def sharded_train() -> Any:
    """Return the sharded step, compiled once for several tests."""
    return sharded(train, pins={"model.first.kernel": jax.P("x", "y")})


WAYS = {
    "bare": lambda fn: sharded_train(),
    "over nnx.jit": lambda fn: sharded(nnx.jit(fn)),
    "over nnx.jit that donates": lambda fn: sharded(nnx.jit(fn, donate_argnums=(0, 1))),
    "under nnx.jit": lambda fn: nnx.jit(sharded(fn)),
}


@cache
def trained() -> tuple[list[Any], Any]:
    """Return the losses of three steps under `nnx.jit`, and the state after them."""
    objects, step = make(), nnx.jit(train)
    return [step(*objects, batch()) for _ in range(3)], states(*objects)


@pytest.mark.parametrize("way", covering(WAYS, ["bare"]))
def test_training_is_as_under_nnx_jit(way: str) -> None:
    got, step = make(), WAYS[way](train)
    losses, expected = trained()
    for loss in losses:
        assert_close(step(*got, batch()), loss)
    assert_close(states(*got), expected)
    assert got[0].tied is got[0].first


def test_what_is_written_back_lies_as_what_it_replaces() -> None:
    model, optimizer = make()
    step = sharded_train()
    plan = step.plan(model, optimizer, batch())
    for _ in range(2):
        step(model, optimizer, batch())
        assert model.first.kernel.get_value().sharding.spec == jax.P("x", "y")
    moment = optimizer.opt_state[0].mu["first"]["kernel"].get_value()
    assert moment.sharding.spec == plan.in_specs[1].opt_state[0].mu.first.kernel
    assert plan.in_specs[0].first.kernel == jax.P("x", "y")
    assert plan.out_specs == jax.P()


def test_paths_are_those_that_a_user_writes() -> None:
    model, optimizer = make()
    plan = sharded_train().plan(model, optimizer, x=batch())
    paths = {leaf.path for leaf in plan.inputs}
    assert {
        "model.first.kernel",
        "optimizer.opt_state[0].mu.first.kernel",
        "x",
    } <= paths
    assert not any("value" in path for path in paths)
    assert "out: model.norm.mean" in {leaf.path for leaf in plan.outputs}


def test_old_arrays_are_donated_and_those_held_elsewhere_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = make()
    step = sharded_train()
    plan = step.plan(model, optimizer, batch())
    gone = {leaf.path for leaf in plan.inputs if leaf.is_donated}
    assert {"model.first.kernel", "optimizer.step", "model.norm.mean"} <= gone
    assert "x" not in gone
    assert "model.drop.rngs.key" not in gone  # a key is read, its count changes
    step(model, optimizer, batch())
    snapshot = model.first.kernel.get_value()
    before = np.asarray(snapshot).copy()
    step(model, optimizer, batch())
    np.testing.assert_array_equal(snapshot, before)
    del snapshot
    x = jax.device_put(batch(), plan.in_shardings[2])
    moved: list[Any] = []
    put = jax.device_put
    monkeypatch.setattr(
        jax, "device_put", lambda *a, **k: moved.append(a[0]) or put(*a, **k)
    )
    step(model, optimizer, x)
    assert moved == []


@pytest.mark.filterwarnings("error::rhino_jax.errors.RhinoWarning")
def test_train_and_eval_mode_are_two_signatures() -> None:
    @sharded
    def forward(model: Any, x: jax.Array) -> jax.Array:
        return model(x)

    model, same = (nnx.BatchNorm(16, rngs=nnx.Rngs(0)) for _ in range(2))
    for change in ("train", "eval", "train"):
        getattr(model, change)()
        getattr(same, change)()
        assert_close(forward(model, batch()), nnx.jit(lambda m, x: m(x))(same, batch()))
        assert_close(states(model), states(same))
    assert "2 signatures" in repr(forward)
