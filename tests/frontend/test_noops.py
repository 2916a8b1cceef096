"""Equations that do nothing: found, taken out, and the rest unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import rhino_jax as rhino
from rhino_jax._compat import open_jaxpr
from rhino_jax.frontend.noops import without_noops
from rhino_jax.frontend.trace import trace
from rhino_jax.plan.fingerprint import fingerprint


def scaled(scale, x):
    """Its scale's cotangent is summed over no dims where a mesh is in context."""

    def loss(scale):
        return jnp.sum(jnp.square(jnp.exp(scale) * jnp.tanh(x)))

    return jax.value_and_grad(loss)(scale)


def in_loop(scale, x):
    """The same inside a loop's body."""

    def body(total, row):
        return total + scaled(scale, row)[1], ()

    return jax.lax.scan(body, jnp.float32(0), x)[0]


ARGS = (jnp.float32(0.3), jnp.linspace(-1.0, 1.0, 32, dtype=jnp.float32).reshape(8, 4))


def empty_reductions(jaxpr):
    return [
        eqn
        for eqn in open_jaxpr(jaxpr).eqns
        if eqn.primitive.name == "reduce_sum" and not eqn.params["axes"]
    ]


@pytest.mark.parametrize("fn", [scaled, in_loop])
def test_a_mesh_in_context_does_not_change_the_program(fn):
    mesh = AbstractMesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    without = trace(fn, ARGS, {}).program
    within = trace(fn, ARGS, {}, mesh=mesh).program
    assert fingerprint(within, ()) == fingerprint(without, ())


def test_results_stay():
    closed = jax.make_jaxpr(
        lambda x: (jax.lax.reduce_sum_p.bind(x, axes=(), out_sharding=None), x + 1)
    )(ARGS[1])
    assert len(empty_reductions(closed)) == 1
    cleaned = without_noops(closed)
    assert not empty_reductions(cleaned)
    for got, want in zip(
        jax.core.eval_jaxpr(open_jaxpr(cleaned), [], ARGS[1]),
        (ARGS[1], ARGS[1] + 1),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_what_has_none_is_the_same_object():
    closed = jax.make_jaxpr(in_loop)(*ARGS)
    assert without_noops(closed) is closed


def test_a_plan_without_a_mesh_runs_on_one(tmp_path):
    """As `python -m rhino_jax plan --save` and `rhino.load_plan` are used."""
    plan = rhino.plan(scaled, *ARGS, hardware="cpu:4")
    plan.save(tmp_path / "p.json")
    run = rhino.load_plan(tmp_path / "p.json").jit(scaled)
    for got, want in zip(run(*ARGS), scaled(*ARGS), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
