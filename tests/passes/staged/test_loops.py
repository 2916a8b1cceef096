"""Loops of backward passes in two: gradients of weights are apart in scans as well."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.passes.staged.sides import sides_of
from rhino_jax.passes.staged.staging import staged, with_split_loops
from rhino_jax.passes.staged.step import TaskKind
from tests.cases import covering
from tests.passes.interpreter import interpret
from tests.passes.staged.helpers_staged import run_tasks, taken_apart
from tests.passes.zoo import compiled, random_like, shape


LAYERS, WIDTH, ROWS = 3, 16, 8


def arguments():
    params = {
        "in": shape(WIDTH, WIDTH),
        "blocks": shape(LAYERS, WIDTH, WIDTH),
        "shift": shape(WIDTH),
    }
    return random_like((params, shape(ROWS, WIDTH)))


def step_of(block):
    def loss(params, x):
        h = jnp.tanh(x @ params["in"])
        h, tops = jax.lax.scan(
            lambda h, w: block(h, w, params["shift"]), h, params["blocks"]
        )
        return jnp.mean(h**2) + 0.1 * jnp.mean(tops)

    def step(params, x):
        gradients = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return step


def block(h, w, shift):
    """With a carry that sums over layers (of `shift`), and results of every layer."""
    h = h + jnp.tanh(h @ w + shift)
    return h, jnp.sin(h)


@pytest.mark.parametrize(
    ("wrap", "is_compiled"),
    covering(
        [
            *((wrap, False) for wrap in (lambda f: f, jax.jit, jax.checkpoint)),
            (jax.checkpoint, True),
        ],
        3,
    ),
)
def test_numbers_are_those_of_one_loop(wrap, is_compiled):
    args = arguments()
    traced = trace(step_of(wrap(block)), args, {}, donate_argnums=(0,))
    apart = taken_apart(traced, 4)
    forward = sides_of(apart).forward
    # The first layer alone, with its derivative; then the loop.
    stages = [int(k > 2) for k in range(len(forward))]
    assert with_split_loops(apart, stages) is not apart
    step = staged(apart, stages, is_split=True)
    late = [t for t in step.tasks[1] if t.kind is TaskKind.WEIGHT_GRADIENT]
    shapes = {tuple(step.types[k].shape) for t in late for k in t.makes}
    assert (LAYERS, WIDTH, WIDTH) in shapes
    arrays = jax.tree.leaves(args)
    run = compiled if is_compiled else interpret
    expected, got = (
        run(traced.closed_jaxpr, arrays),
        run_tasks(step, arrays, is_compiled),
    )
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def test_loops_that_nothing_waits_for_stay_as_they_are():
    traced = trace(step_of(block), arguments(), {}, donate_argnums=(0,))
    apart = taken_apart(traced, 4)
    stages = [0] * len(sides_of(apart).forward)
    assert with_split_loops(apart, stages) is apart
