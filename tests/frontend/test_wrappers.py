"""Only `jax.jit` and `nnx.jit` are taken off, with what they were told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.frontend.parameters import read_parameters, take_off


def double(x: jax.Array, times: int = 2) -> jax.Array:
    return x * times


def wrapped(jitted: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(jitted)
    def plus_one(*args: Any, **kwargs: Any) -> Any:
        return jitted(*args, **kwargs) + 1

    return plus_one


class Callable_:
    """Looks like a jitted function, and is none."""

    def __init__(self, fn: Any) -> None:
        functools.update_wrapper(self, fn)
        self._jit_info = jax.jit(fn)._jit_info

    def __call__(self, x: jax.Array) -> jax.Array:
        return -x


WRAPPERS = {
    "functools.wraps of jit": (wrapped(jax.jit(double)), 3.0),
    "an object like jit": (Callable_(double), -1.0),
    "partial of jit": (functools.partial(jax.jit(double), times=5), 5.0),
    "vmap of jit": (jax.vmap(jax.jit(double)), 2.0),
    "checkpoint": (jax.checkpoint(double), 2.0),
    "jit of functools.wraps": (jax.jit(wrapped(double)), 3.0),
    "jit": (jax.jit(double), 2.0),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_that_does_something_still_does_it(name: str) -> None:
    fn, expected = WRAPPERS[name]
    sharded = rhino.auto_shard(fn, progress=False, mesh={"a": 8}, hardware="v5e")
    np.testing.assert_array_equal(sharded(jnp.ones(8)), np.full(8, expected))


def test_filter_jit_is_called_as_it_is() -> None:
    eqx = pytest.importorskip("equinox")
    jitted = eqx.filter_jit(lambda f, x: f(x) + 1)
    assert take_off(jitted) == (jitted, {})
    sharded = rhino.auto_shard(jitted, progress=False, mesh={"a": 8}, hardware="v5e")
    np.testing.assert_array_equal(sharded(jnp.negative, jnp.ones(8)), np.zeros(8))


def test_nnx_jit_keeps_its_static_and_donated_arguments() -> None:
    nnx = pytest.importorskip("flax.nnx")

    def step(model: Any, x: jax.Array, times: int) -> Any:
        return model(x) * times

    for graph in (True, False):
        jitted = nnx.jit(step, static_argnums=2, donate_argnames="model", graph=graph)
        parameters = read_parameters(jitted)
        assert parameters.fn is step
        assert parameters.static == {"times"}
        assert parameters.donated == {"model"}
    holding = nnx.jit_partial(step, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), graph=False)
    assert take_off(holding) == (holding, {})


def test_shardings_of_a_jit_are_refused() -> None:
    sharding = NamedSharding(jax.make_mesh((8,), ("a",)), P("a"))
    jits = [jax.jit(double, in_shardings=sharding)]
    nnx = pytest.importorskip("flax.nnx")
    jits += [nnx.jit(double, out_shardings=sharding)]
    for jitted in jits:
        with pytest.raises(rhino.TraceError, match=r"with\s+shardings") as caught:
            rhino.auto_shard(jitted)
        assert "pins=" in str(caught.value)
