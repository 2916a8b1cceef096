"""State that a function keeps where it would be lost is refused, and given back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino


X = jnp.ones((8, 8))
LOSSES: list[Any] = []
CACHE: dict[str, Any] = {"last": 0.0}


def shard(fn: Any, **options: Any) -> Any:
    return rhino.auto_shard(fn, mesh={"a": 8}, progress=False, **options)


class Trainer:
    """Keeps its weights in an attribute, as in other frameworks."""

    def __init__(self) -> None:
        self.weights = jnp.eye(8)
        self.history: list[Any] = []
        self.calls = 0

    def step(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        self.weights = self.weights - 0.1 * x
        return self.weights.sum()

    def log(self, x: jax.Array) -> jax.Array:
        self.history.append(x.sum())
        return x

    def count(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        return x + self.calls

    @functools.cached_property
    def mask(self) -> jax.Array:
        return jnp.tril(jnp.ones((8, 8)))

    def masked(self, x: jax.Array) -> jax.Array:
        return x * self.mask

    @shard
    def decorated(self, x: jax.Array) -> jax.Array:
        return self.step(x)


def append(x: jax.Array) -> jax.Array:
    LOSSES.append(x.sum())
    return x


def remember(x: jax.Array) -> jax.Array:
    CACHE["last"] = (x, 1)
    return x


def captured(trainer: Trainer) -> Any:
    return lambda x: trainer.step(x)


def argument(x: jax.Array, trainer: Trainer) -> jax.Array:
    return trainer.step(x)


trainer = Trainer()
REFUSED = {
    "bound method": (lambda: shard(trainer.step), "self.weights"),
    "a list of an object": (lambda: shard(trainer.log), "self.history[0]"),
    "closure": (lambda: shard(captured(trainer)), "trainer.weights"),
    "a wrapped closure": (lambda: shard(jax.jit(captured(trainer))), "trainer.weights"),
    "partial": (
        lambda: shard(functools.partial(argument, trainer=trainer)),
        "trainer.weights",
    ),
    "static argument": (
        lambda: functools.partial(
            shard(argument, static_argnames="trainer"), trainer=trainer
        ),
        "trainer.weights",
    ),
    "argument": (lambda: lambda x: shard(argument)(x, trainer), "trainer.weights"),
    "decorated method": (lambda: trainer.decorated, "self.weights"),
    "global list": (lambda: shard(append), "LOSSES[0]"),
    "global dict": (lambda: shard(remember), "CACHE['last']"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_refused_before_anything_runs(name: str) -> None:
    make, path = REFUSED[name]
    with pytest.raises(rhino.TraceError, match="would be lost") as caught:
        make()(X)
    assert caught.value.where == path
    assert caught.value.numbers.startswith("float32[")
    assert "jax.new_ref" in caught.value.fix
    np.testing.assert_array_equal(trainer.weights, np.eye(8))
    assert trainer.history == LOSSES == []
    assert CACHE == {"last": 0.0}


def test_python_values_are_kept_as_under_jit() -> None:
    counter = Trainer()
    np.testing.assert_array_equal(shard(counter.count)(X), np.full((8, 8), 2.0))
    assert counter.calls == 1


def test_what_is_only_remembered_is_computed_again() -> None:
    remembers = Trainer()
    expected = np.tril(np.ones((8, 8)))
    for x in (X, jnp.ones((16, 8, 8))):
        got = shard(remembers.masked)(x)
        np.testing.assert_array_equal(got, np.broadcast_to(expected, x.shape))
    np.testing.assert_array_equal(remembers.mask, expected)


def test_within_another_trace_it_is_the_others_affair() -> None:
    seen: list[Any] = []

    def outer(x: jax.Array) -> jax.Array:
        return shard(lambda y: seen.append(y) or y)(x)

    jax.jit(outer)(X)
    assert len(seen) >= 1


@pytest.mark.parametrize("how", ["closure", "partial", "bound method"])
def test_a_captured_module_that_changes_is_refused(how: str) -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Counts(nnx.Module):
        def __init__(self) -> None:
            self.count = nnx.Variable(jnp.zeros(()))

        def add(self, x: jax.Array) -> jax.Array:
            self.count[...] += x.sum()
            return x

    model = Counts()
    fn = {
        "closure": lambda x: model.add(x),
        "partial": functools.partial(lambda m, x: m.add(x), model),
        "bound method": model.add,
    }[how]
    with pytest.raises(rhino.TraceError, match="would be lost") as caught:
        shard(fn)(X)
    names = {"closure": "model", "partial": "args[0]", "bound method": "self"}
    assert caught.value.where == names[how]
    assert float(model.count[...]) == 0.0
    np.testing.assert_array_equal(shard(lambda x: x + model.count[...])(X), X)


def test_only_objects_that_hold_tracers_are_refused_and_others_run() -> None:
    class Config:
        def __init__(self) -> None:
            self.table = {"scale": 2.0}
            self.parent = self  # a cycle
            self.scale: Any = None

    config = Config()

    def fn(x: jax.Array) -> jax.Array:
        config.scale = config.table["scale"]
        config.table["seen"] = x.shape
        return x * config.scale

    np.testing.assert_array_equal(shard(fn)(X), np.full((8, 8), 2.0))
    assert config.table["seen"] == (8, 8)
