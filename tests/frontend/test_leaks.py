"""State that a function keeps where it would be lost is refused, and given back."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
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


@dataclasses.dataclass(slots=True)
class Slotted:
    """Has no `__dict__`."""

    weights: Any = None

    def step(self, x: jax.Array) -> jax.Array:
        self.weights = x * 2
        return x


class Shared:
    """Keeps what it has in its class."""

    weights: Any = None

    @classmethod
    def step(cls, x: jax.Array) -> jax.Array:
        cls.weights = x * 2
        return x

    def set_on_class(self, x: jax.Array) -> jax.Array:
        return type(self).step(x)


def set_global(x: jax.Array) -> jax.Array:
    global WEIGHTS
    WEIGHTS = WEIGHTS - x
    return x


def set_new_global(x: jax.Array) -> jax.Array:
    global NOT_THERE_YET
    NOT_THERE_YET = x * 2
    return x


def set_attribute(x: jax.Array) -> jax.Array:
    set_attribute.last = x * 2  # type: ignore[attr-defined]
    return x


def rebinds() -> tuple[Any, Any]:
    weights: Any = 0.0

    def step(x: jax.Array) -> jax.Array:
        nonlocal weights
        weights = weights - x
        return x

    return step, lambda: weights


WEIGHTS: Any = 0.0
QUEUE: collections.deque[Any] = collections.deque([1.0], maxlen=2)
OBJECTS = np.array([None, 1.0], object)
NESTED = ({"weights": 0.0},)
MODULE: Any = types.ModuleType("module")
MODULE.weights = 0.0
DEEP = functools.reduce(lambda inner, _: [inner], range(9), Trainer())
slotted, step_of_closure = Slotted(), rebinds()
HOLDERS: dict[str, tuple[Any, str, Any]] = {
    "slots": (slotted.step, "self.weights", lambda: slotted.weights),
    "class method": (Shared.step, "Shared.weights", lambda: Shared.weights),
    "class": (Shared().set_on_class, "Shared.weights", lambda: Shared.weights),
    "nonlocal": (step_of_closure[0], "weights", step_of_closure[1]),
    "global": (set_global, "WEIGHTS", lambda: WEIGHTS),
    "new global": (
        set_new_global,
        "NOT_THERE_YET",
        lambda: globals().get("NOT_THERE_YET"),
    ),
    "attribute of a function": (
        set_attribute,
        "set_attribute.__dict__['last']",
        lambda: getattr(set_attribute, "last", None),
    ),
    "deque": (lambda x: QUEUE.append(x * 2), "QUEUE[1]", lambda: list(QUEUE)),
    "array of objects": (
        lambda x: OBJECTS.__setitem__(0, x * 2),
        "OBJECTS[0]",
        lambda: list(OBJECTS),
    ),
    "tuple": (
        lambda x: NESTED[0].update(weights=x * 2),
        "NESTED[0]['weights']",
        lambda: NESTED[0],
    ),
    "module": (
        lambda x: setattr(MODULE, "weights", x * 2),
        "MODULE.weights",
        lambda: MODULE.weights,
    ),
    "far": (
        lambda x: functools.reduce(lambda a, _: a[0], range(9), DEEP).step(x),
        f"DEEP{'[0]' * 9}.weights",
        lambda: None,
    ),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_whatever_keeps_a_value_is_given_back_what_it_held(name: str) -> None:
    fn, path, held = HOLDERS[name]
    before = held()
    for _ in range(2):
        with pytest.raises(rhino.TraceError, match="would be lost") as caught:
            shard(fn)(X)
        assert caught.value.where == path
        assert held() == before


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
