"""Passes that were chosen are done again, in order, and keep inputs and outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax._compat import jaxpr_consts, open_jaxpr
from rhino_jax.frontend.trace import trace
from rhino_jax.ir.transform import Transform
from rhino_jax.passes import apply
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.program_pass import ProgramPass
from rhino_jax.rewrite.retraced import retraced
from tests.passes.interpreter import interpret


CAPTURED = np.arange(4.0, dtype=np.float32)


def function(x, y):
    return jnp.sin(x * y + jnp.asarray(CAPTURED)), x.sum()


def as_it_was(closed, program, choice):
    opened = open_jaxpr(closed)
    count = len(opened.invars)
    return retraced(
        closed, lambda *xs: jax.core.eval_jaxpr(opened, xs[count:], *xs[:count])
    )


@pytest.fixture
def traced(monkeypatch):
    same = ProgramPass("same", as_it_was)
    monkeypatch.setattr(apply, "PASSES", {"same": same})
    return trace(function, (jnp.ones((8, 4)), jnp.ones(4)), {})


def test_a_chosen_pass_keeps_inputs_outputs_and_constants(traced):
    (found,) = (apply_passes(traced, [Transform("same", 1, 1, "x")]),)
    assert str(found.program) == str(traced.program)
    assert [e.path for e in found.program.inputs] == ["x", "y", "const[0] f32[4]"]
    np.testing.assert_array_equal(found.consts[0], CAPTURED)
    assert found.program.transforms[-1].choice == "x"
    assert not traced.program.transforms or not traced.program.transforms[-1].choice


def test_what_follows_from_the_program_is_not_done_again(traced):
    assert apply_passes(traced, [Transform("dead code", 3, 2)]) is traced


def test_a_pass_is_done_once(traced):
    wanted = [Transform("same", 1, 1, "x"), Transform("same", 1, 1, "y")]
    assert apply_passes(traced, wanted) is apply_passes(traced, wanted)


def test_arrays_that_a_pass_captures_are_held_inside(traced):
    extra = jnp.arange(3.0)
    found = retraced(traced.closed_jaxpr, lambda *xs: [xs[0], 2 * extra])
    assert len(jaxpr_consts(found)) == len(traced.consts)
    arrays = np.ones((8, 4), np.float32), np.ones(4, np.float32)
    np.testing.assert_array_equal(interpret(found, arrays)[1], 2 * extra)


def test_a_loop_calls_a_function_with_a_table_in_micro_batches():
    """As rotary embeddings are: the loop's body is traced once more."""
    scale = jax.jit(lambda x: x * CAPTURED)

    def step(layers, x):
        def loss(layers):
            h, _ = jax.lax.scan(lambda h, w: (scale(h @ w), None), x, layers)
            return jnp.mean(h**2)

        return jax.grad(loss)(layers)

    args = np.ones((2, 4, 4), np.float32), np.arange(32, dtype=np.float32).reshape(8, 4)
    of = trace(step, args, {})
    found = apply_passes(of, [Transform("micro-batches", 0, 0, '{"count": 2}')])
    expected, got = (interpret(t.closed_jaxpr, args)[0] for t in (of, found))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
