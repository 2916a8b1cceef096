"""Wide-ResNet in stages, whose statistics are those of each micro-batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rhino_jax as rhino
from rhino_jax.errors import MicrobatchError
from rhino_jax.models import registry, wide_resnet
from rhino_jax.models.train import optimizer
from tests.runtime.stand_in import normal


COUNT = 4
"""Micro-batches: each has every fourth row."""


def by_hand(config, params, opt_state, state, batch):
    """One step on one device, its gradients and statistics accumulated."""
    loss = jax.jit(
        jax.value_and_grad(
            lambda p, s, b: wide_resnet.loss(config, p, s, b), has_aux=True
        )
    )
    rows = (jax.tree.map(lambda x, i=i: x[i::COUNT], batch) for i in range(COUNT))
    made = [loss(params, state, piece) for piece in rows]
    (value, state), gradients = jax.tree.map(lambda *xs: sum(xs) / COUNT, *made)
    tx = optimizer(config.optimizer, config.learning_rate)
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, state, value


@pytest.mark.slow
@pytest.mark.parametrize("widens", ["inside", "spatial"])
def test_two_steps_are_those_of_a_loop_written_by_hand(widens):
    workload = registry.get("wide-resnet-tiny", widens=widens, batch=8)
    args = expected = workload.make_args(jax.random.key(0))
    step = rhino.auto_shard(
        workload.step,
        mesh={"stage": 2, "data": 2},
        microbatches=COUNT,
        per_microbatch="batch_norm",
        schedule="1f1b",
    )
    for seed in (1, 2):
        batch = workload.make_batch(jax.random.key(seed))
        expected = by_hand(workload.config, *expected[:3], batch)
        args = step(*args[:3], batch)
        for a, b in zip(jax.tree.leaves(args), jax.tree.leaves(expected), strict=True):
            scale = 1e-4 * np.abs(b).max() + 1e-6
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=scale)
    places = {leaf.stages for leaf in step.plan(*args[:3], batch).inputs}
    assert len(places) > 1


def batch_norm(x, running):
    mean, variance = x.mean(0), x.var(0)
    kept = jax.tree.map(lambda r, s: 0.9 * r + 0.1 * s, running, (mean, variance))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5), kept


def small_step(params, running, batch):
    """Running statistics move to those of the batch, as they do in Flax."""

    def loss(params):
        x, kept = batch, []
        for w, r in zip(params, running, strict=True):
            x, r = batch_norm(jnp.tanh(x @ w), r)
            kept.append(r)
        return jnp.mean(x**3), kept

    (value, kept), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), kept, value


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"stage": 2}, {"data": 2}], ids=str)
def test_running_statistics_are_the_mean_of_those_of_micro_batches(mesh):
    params = [normal(i, 8, 8) / 3 for i in range(4)]
    running = [(jnp.zeros(8), jnp.ones(8))] * 4
    batch = normal(4, 16, 8)
    step = jax.jit(small_step)
    each = [step(params, running, np.asarray(batch)[i::COUNT]) for i in range(COUNT)]
    expected = jax.tree.map(lambda *xs: np.mean(xs, 0), *each)
    options = {"microbatches": COUNT, "per_microbatch": "batch_norm"}
    step = rhino.auto_shard(small_step, mesh=mesh, **options)
    found = step(params, running, batch)
    stages = {leaf.stage for leaf in step.last_plan.inputs if "running" in leaf.path}
    assert len(stages) == len(step.last_plan.stages)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_without_a_name_it_is_refused():
    workload = registry.get("wide-resnet-tiny")
    with pytest.raises(MicrobatchError) as caught:
        rhino.plan(
            workload.step,
            *workload.abstract_args(),
            mesh={"stage": 2},
            microbatches=4,
        )
    assert "per_microbatch='batch_norm'" in caught.value.fix
