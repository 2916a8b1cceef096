"""Which sums of loops are worth leaving open whatever the plan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rhino_jax.frontend.trace import trace
from rhino_jax.ir.transform import Transform
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.deferred_reductions import accumulated, as_text, from_text
from tests.passes.deferred_reductions.pricing import normal, ran, sums


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


def loss(p: Any, x: Any) -> Any:
    """Checkpointed layers in a scan."""

    @jax.checkpoint
    def layer(h: Any, w: Any) -> Any:
        return h + jnp.tanh(h @ w), None

    return (lax.scan(layer, x @ p[0], p[1])[0] ** 2).mean()


def nothing(p: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, p)


def added(g: Any, p: Any, x: Any) -> Any:
    return jax.tree.map(jnp.add, g, jax.grad(loss)(p, x))


def in_a_scan(p: Any, xs: Any) -> Any:
    return lax.scan(lambda g, x: (added(g, p, x), None), nothing(p), xs)[0]


def in_a_fori_loop(p: Any, xs: Any) -> Any:
    return lax.fori_loop(0, len(xs), lambda i, g: added(g, p, xs[i]), nothing(p))


def in_two_loops(p: Any, xs: Any) -> Any:
    def outer(g: Any, xs: Any) -> Any:
        return lax.scan(lambda g, x: (added(g, p, x), None), g, xs)

    return lax.scan(outer, nothing(p), xs.reshape(2, -1, *xs.shape[1:]))[0]


def where_finite(p: Any, xs: Any) -> Any:
    def step(g: Any, x: Any) -> Any:
        value, more = jax.value_and_grad(loss)(p, x)
        fits = jnp.isfinite(value)
        return jax.tree.map(lambda a, b: jnp.where(fits, a + b, a), g, more), value

    return lax.scan(step, nothing(p), xs)


def running_mean(p: Any, xs: Any) -> Any:
    def step(c: Any, x: Any) -> Any:
        (g, n), more = c, jax.grad(loss)(p, x)
        return (jax.tree.map(lambda a, b: a + (b - a) / (n + 1), g, more), n + 1), None

    return lax.scan(step, (nothing(p), 0.0), xs)[0][0]


def scaled_and_clipped(p: Any, xs: Any) -> Any:
    def step(g: Any, x: Any) -> Any:
        more = jax.grad(lambda p: 1024 * loss(p, x))(p)
        return jax.tree.map(lambda a, b: a + b / 1024, g, more), None

    g = lax.scan(step, nothing(p), xs)[0]
    norm = jnp.sqrt(sum((x**2).sum() for x in g))
    return jax.tree.map(lambda x: x / jnp.maximum(norm, 1), g)


@pytest.mark.parametrize(
    "fn",
    [
        in_a_scan,
        in_a_fori_loop,
        in_two_loops,
        where_finite,
        running_mean,
        scaled_and_clipped,
    ],
)
def test_gradients_are_summed_after_loops(fn: Any) -> None:
    first, layers, xs = normal([(16, 16), (3, 16, 16), (4, 8, 16)])
    args = (first, layers), xs
    traced = trace(fn, args, {})
    found = accumulated(traced.program, [4])
    shapes = {traced.program.values[v].shape for s in found for v in s.closed}
    assert {(16, 16), (3, 16, 16)} <= shapes
    choice = as_text(site.group for site in found)
    again = apply_passes(traced, [Transform("deferred reductions", 0, 0, choice)])
    # In loops, losses alone are summed.
    looped = [[n for _, n in sums(t) if n > 1] for t in (traced, again)]
    assert looped[0] == looped[1]
    assert len(sums(again)) >= len(sums(traced)) + 2
    for before, after in zip(ran(traced, args), ran(again, args), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)


def test_momentum_that_steps_in_the_loop_is_not_deferred() -> None:
    def fn(p: Any, xs: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            p, m = c
            m = jax.tree.map(lambda m, g: 0.9 * m + g, m, jax.grad(loss)(p, x))
            return (jax.tree.map(lambda p, m: p - 0.1 * m, p, m), m), None

        return lax.scan(step, (p, nothing(p)), xs)[0]

    first, layers, xs = normal([(16, 16), (3, 16, 16), (4, 8, 16)])
    program = trace(fn, ((first, layers), xs), {}).program
    assert all(
        program.values[v].shape not in ((16, 16), (3, 16, 16))
        for site in accumulated(program, [4])
        for v in site.closed
    )
