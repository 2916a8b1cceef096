"""Wide-ResNet in stages, whose statistics are those of each micro-batch."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import rhino_jax as rhino
from rhino_jax.errors import MicrobatchError
from rhino_jax.models import registry, wide_resnet
from rhino_jax.models.optim import optimizer


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


def test_without_a_name_it_is_refused():
    workload = registry.get("wide-resnet-tiny")
    with pytest.raises(MicrobatchError) as caught:
        rhino.plan(workload.step, *workload.abstract_args(), stages=2, microbatches=4)
    assert "per_microbatch='batch_norm'" in caught.value.fix
