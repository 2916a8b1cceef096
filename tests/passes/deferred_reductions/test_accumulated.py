"""Which sums of loops are worth leaving open whatever the plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax.frontend.trace import trace
from rhino_jax.passes.deferred_reductions import accumulated, as_text, from_text
from tests.passes.deferred_reductions.pricing import normal


def recurrent(w, xs):
    def loss(w):
        def step(h, x):
            return jnp.tanh(h @ w + x), None

        return (lax.scan(step, jnp.zeros_like(xs[0]), xs)[0] ** 2).sum()

    return jax.grad(loss)(w)


def test_gradients_of_recurrent_weights_are_not_the_state() -> None:
    program = trace(recurrent, normal([(16, 16), (5, 8, 16)]), {}).program
    (site,) = accumulated(program, [8])
    (op,) = (program.ops[op] for op in site.ops)
    assert op.name == "dot_general" and op.source.is_backward
    # The weights' gradient is one carry, that of the state another, read in each trip.
    assert len(site.closed) == 1 and program.values[site.closed[0]].shape == (16, 16)
    # It is made in the loop, and summed once behind it: 4 of 5 sums less.
    assert site.saved_bytes == 4 * 16 * 16 * 4


def test_sums_outside_of_loops_are_left_to_the_plan() -> None:
    def fn(a, b):
        return a @ b + (2 * a) @ b

    assert accumulated(trace(fn, normal([(8, 16), (16, 8)]), {}).program, [8]) == []


def test_what_does_not_come_out_even_is_left() -> None:
    program = trace(recurrent, normal([(16, 16), (5, 6, 16)]), {}).program
    assert accumulated(program, [8]) == []


def test_choices_are_text() -> None:
    program = trace(recurrent, normal([(16, 16), (5, 8, 16)]), {}).program
    groups = [site.group for site in accumulated(program, [2, 4])]
    assert groups[0].pieces == (2, 4)
    assert list(from_text(as_text(groups))) == groups
    assert as_text([]) == "" and list(from_text("")) == []
