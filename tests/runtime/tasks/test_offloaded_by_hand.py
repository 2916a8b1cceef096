"""Stages that have values wait in the host's memory because they are told to."""

from __future__ import annotations

from dataclasses import replace

import helpers_coupled
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.passes.staged.apart import take_apart
from rhino_jax.passes.staged.sides import sides_of
from rhino_jax.plan.stages import StageRemat
from rhino_jax.runtime.tasks import controller as running, moves
from tests.cases import covering


WIDTH, ROWS, LAYERS = 16, 64, 4
DONATED = {"donate_argnums": 0}


def train_step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - x) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments():
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in keys[:LAYERS]]
    return params, jax.random.normal(keys[-1], (ROWS, WIDTH))


def told(plan, step=train_step, args=None):
    """A plan whose stages send all that they may."""
    args = args or arguments()
    traced = trace(step, args, {}, donate_argnums=(0,))
    apart = take_apart(traced.closed_jaxpr, traced.program, plan.microbatches)
    of = sides_of(apart)
    ops = (of.program.ops[of.program.body.ops[i]] for i in of.forward)
    text = str(RematChoice(offload=tuple(v for op in ops for v in op.results)))
    every = (StageRemat(choice=text, offloaded=1),) * len(plan.stages)
    return replace(plan, pipeline=replace(plan.pipeline, remat=every))


def two_steps(step, make=arguments):
    params, x = make()
    for _ in range(2):
        params, value = step(params, x)
    return [*jax.tree.leaves(params), value]


@pytest.fixture
def moved(monkeypatch):
    """Kinds of memory that values were moved to."""
    found, as_it_was = [], moves.moved_to

    def moved_to(arrays, shardings):
        there = as_it_was(arrays, shardings)
        found.extend(x.sharding.memory_kind for x in there)
        return there

    monkeypatch.setattr(running, "moved_to", moved_to)
    return found


@pytest.mark.parametrize(
    "kinds", covering([moves.HOST_KINDS, ("none of these",)], each=True), ids=str
)
def test_two_steps_are_those_of_one_device(kinds, moved, monkeypatch):
    monkeypatch.setattr(moves, "HOST_KINDS", kinds)
    mesh = jax.make_mesh((2, 2), ("stage", "data"))
    options = {"mesh": mesh, "microbatches": 4, "schedule": "gpipe", **DONATED}
    plan = told(rhino.plan(train_step, *arguments(), **options))
    got = two_steps(plan.jit(train_step, **DONATED))
    for a, b in zip(got, two_steps(jax.jit(train_step)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    own = jax.devices()[0].default_memory().kind
    known = {m.kind for m in jax.devices()[0].addressable_memories()}
    there = next((k for k in kinds if k in known), own)
    # Where devices know no memory of hosts, values stay.
    assert set(moved) == {there, own}
    assert moved.count(there) >= 2 * 3 * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["contrastive", "balanced", "normed"])
def test_coupled_micro_batches_give_the_same(name, moved):
    step = helpers_coupled.STEPS[name]
    make = helpers_coupled.arguments
    options = {"stages": 2, "microbatches": 4, "schedule": "gpipe", **DONATED}
    plan = told(rhino.plan(step, *make(), **options), step, make())
    got = two_steps(plan.jit(step, **DONATED), make)
    for a, b in zip(got, two_steps(jax.jit(step), make), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert "pinned_host" in moved
