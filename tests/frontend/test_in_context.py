"""What a user's function is called in errors, and which mesh it sees."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino


def branches(params: Any, x: jax.Array) -> jax.Array:
    return x if params["w"].sum() > 0 else -x


def sizes(params: Any, x: jax.Array) -> jax.Array:
    return jnp.zeros(x.astype(int)[0]) + params["w"]


def converts(params: Any, x: jax.Array) -> float:
    return float(params["w"][0]) + x.shape[0]


def indexes(params: Any, x: jax.Array) -> Any:
    return [params, x][x.astype(int)[0]]


class Model:
    def __call__(self, params: Any, x: jax.Array) -> jax.Array:
        return branches(params, x)


def message(call: Callable[..., Any]) -> str:
    params = {"w": jnp.ones(8)}
    with pytest.raises(Exception) as caught:
        call(params, x=jnp.ones(8))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    "fn",
    [branches, sizes, converts, indexes, functools.partial(branches), Model().__call__],
)
def test_errors_say_what_those_of_jit_say(fn: Any) -> None:
    expected = message(jax.jit(fn))
    assert f"{__file__}:" in expected
    assert message(rhino.auto_shard(fn, progress=False)) == expected
    plan = functools.partial(rhino.plan, fn, mesh={"a": 2}, hardware="v5e")
    assert message(plan) == expected


def test_a_leaked_tracer_names_the_function_that_leaked_it() -> None:
    class Cache:
        __slots__ = ("seen",)

    cache = Cache()

    def keeps(x: jax.Array) -> jax.Array:
        cache.seen = x * 2
        return x

    rhino.plan(keeps, jnp.ones(8), mesh={"a": 2}, hardware="v5e", progress=False)
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"was keeps at .*\.py:"):
        cache.seen + 1


def dense(rules: Any, axis: str) -> Any:
    linen = pytest.importorskip("flax.linen")

    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            init = linen.with_logical_partitioning(
                linen.initializers.lecun_normal(), ("embed", "mlp")
            )
            x = linen.Dense(32, kernel_init=init)(x)
            return linen.with_logical_constraint(x, ("batch", "mlp"))

    model, x = Dense(), jax.random.normal(jax.random.key(0), (16, 16))
    params = model.init(jax.random.key(1), x)

    def step(params: Any, x: jax.Array) -> Any:
        return jax.value_and_grad(lambda p: jnp.mean(model.apply(p, x) ** 2))(params)

    def run() -> Any:
        with linen.logical_axis_rules(rules):
            sharded = rhino.auto_shard(step, mesh={axis: 8}, progress=False)
            return sharded(params, x), jax.jit(step)(params, x)

    return run


@pytest.mark.parametrize("axis", ["data", "another"])
def test_logical_rules_may_name_axes_that_the_mesh_has_not(axis: str) -> None:
    run = dense((("batch", "data"), ("mlp", None), ("embed", None)), axis)
    if axis == "data":
        with warnings.catch_warnings():
            warnings.simplefilter("error", rhino.RhinoWarning)
            got, expected = run()
    else:
        with pytest.warns(rhino.RhinoWarning, match="traced without the mesh.*data"):
            got, expected = run()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        got,
        expected,
    )


def test_an_axis_that_is_nowhere_is_the_first_error() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, jax.P("nowhere"))

    with pytest.raises(ValueError, match="nowhere"):
        rhino.plan(step, jnp.ones(8), mesh={"a": 8}, progress=False)
