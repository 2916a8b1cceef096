"""A flattened program computes what the program does; equal numbers, equal arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.rewrite.emit import substitute
from rhino_jax.rewrite.flat import FlatProgram
from rhino_jax.rewrite.flatten import all_calls, flat_region, flatten
from rhino_jax.rewrite.numbers import ValueNumbers
from rhino_jax.rewrite.retraced import retraced
from tests.passes.interpreter import interpret


TABLE = np.linspace(0.5, 1.5, 4, dtype=np.float32)


@jax.custom_jvp
def scaled(x):
    return x * TABLE


scaled.defjvp(lambda p, t: (scaled(*p), t[0] * TABLE))


@partial(jax.jit, static_argnums=1)
def layer(x, power):
    """A call with a captured table, and calls inside of it."""
    return jax.nn.gelu(jnp.sin(scaled(x)) ** power)


def looped(x):
    def step(carry, row):
        return layer(carry, 2) + row, jnp.tanh(carry)

    return lax.scan(step, x[0], x)


def branched(x):
    return lax.cond(x.sum() > 0, lambda y: layer(y, 2), lambda y: layer(y, 3), x)


def recomputed(x):
    def loss(x):
        y = jax.checkpoint(lambda y: layer(layer(y, 2), 2))(x)
        return jnp.sum(y * layer(x, 2)) + 0 * jnp.sum(jnp.asarray(0.0))

    return jax.value_and_grad(loss)(x)


def twice(x):
    signs = jnp.where(x > 0, 0.0, -0.0)
    return layer(x, 2), layer(x, 3), layer(x, 2), 1 / signs, 1 / (x * 0.0)


@jax.custom_batching.custom_vmap
def doubled(x):
    return 2 * x


doubled.def_vmap(lambda size, batched, x: (2 * x, *batched))


def batched(x):
    """A call whose parameters name its body in a way of their own."""
    return doubled(x), doubled(x), doubled(x + 1)


FUNCTIONS = [looped, branched, recomputed, twice, batched]


def traced_of(fn: Any) -> tuple[Traced, Any]:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
    return trace(fn, (x,), {}), x


def arrays_of(flat: FlatProgram, closed: Any, x: Any) -> dict[int, Any]:
    """Run all ops of the body of a flattened program; value id → array."""
    values = [v for each in flat.top.ops for v in each.results]

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(flat.top.inputs, arrays, strict=True))
        flat.run({each.op.id for each in flat.top.ops}, env)
        return [flat.read(v, env) for v in (*values, *flat.top.outputs)]

    found = interpret(retraced(closed, run), [x])
    return dict(zip((*values, *flat.top.outputs), found, strict=True))


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_it_computes_the_same(fn: Any) -> None:
    traced, x = traced_of(fn)
    expected = interpret(traced.closed_jaxpr, [x])
    for calls in (None, all_calls(), lambda op: False):
        flat = flatten(traced.program, traced.closed_jaxpr, calls)
        env = arrays_of(flat, traced.closed_jaxpr, x)
        for value, array in zip(flat.top.outputs, expected, strict=True):
            np.testing.assert_allclose(env[value], array, rtol=1e-5, atol=1e-6)
        plain = flatten(traced.program, None, calls)
        assert plain.top.outputs == flat.top.outputs
        assert plain.top.maker == flat.top.maker


@pytest.mark.parametrize("fn", [looped, twice])
def test_ops_that_an_output_needs_compute_it(fn: Any) -> None:
    """In any numbering."""
    traced, x = traced_of(fn)
    region = flat_region(traced.closed_jaxpr)
    ids = {v: 7 + 2 * v for made in (region.inputs, *region.makes) for v in made}
    for k, expected in enumerate(interpret(traced.closed_jaxpr, [x])):
        for of in (region, region.renamed(ids)):
            ops, read = of.needed([of.outputs[k]])
            assert read <= {*of.inputs}
            env = {of.inputs[0]: x}
            of.run(of.late(ops, ()), env)
            found = of.result(of.outputs[k], env)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_deep", [False, True])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_values_with_one_number_are_equal(fn: Any, is_deep: bool) -> None:
    traced, x = traced_of(fn)
    calls = None if is_deep else all_calls()  # as un-remat and micro-batches do
    flat = flatten(traced.program, traced.closed_jaxpr, calls)
    numbers = ValueNumbers(flat, is_deep=is_deep)
    first: dict[int, Any] = {}
    for value, array in arrays_of(flat, traced.closed_jaxpr, x).items():
        number = numbers.of.get(value)
        same = first.setdefault(value if number is None else -number, array)
        np.testing.assert_array_equal(same, array)
        np.testing.assert_array_equal(np.signbit(same), np.signbit(array))


def test_equal_layers_have_one_number_and_others_not() -> None:
    traced, _ = traced_of(twice)
    flat = flatten(traced.program, traced.closed_jaxpr, all_calls())
    a, b, c, *_ = (ValueNumbers(flat).of[v] for v in flat.top.outputs)
    assert a == c != b


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_equations_are_substituted_in_calls(fn: Any) -> None:
    """Every sine of an inlined call becomes a cosine of its operand less a quarter."""
    traced, x = traced_of(fn)
    found = substitute(traced.closed_jaxpr, _sine_as_cosine)
    expected = interpret(traced.closed_jaxpr, [x])
    for made, array in zip(interpret(found, [x]), expected, strict=True):
        np.testing.assert_allclose(made, array, rtol=1e-4, atol=1e-5)
    assert "sin" not in {eqn.primitive.name for eqn in found.jaxpr.eqns}


def _sine_as_cosine(eqn: Any, operands: list[Any]) -> list[Any] | None:
    if eqn.primitive.name == "sin":
        return [jnp.cos(operands[0] - jnp.pi / 2)]
    return None
