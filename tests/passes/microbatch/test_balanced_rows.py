"""Balancing losses of mixtures of experts in micro-batches: each sorts its own rows by
sizes of its own groups, and the loss counts the rows of all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rhino_jax as rhino
from rhino_jax.errors import CoupledBatchError, MicrobatchError
from rhino_jax.passes.microbatch import MicrobatchCut
from tests.cases import covering
from tests.passes.experts.mixtures import (
    CHOICES,
    EXPERTS,
    WIDTH,
    batch,
    multiplied,
    params,
)
from tests.passes.experts.random_mixtures import drawn
from tests.passes.microbatch.helpers_microbatch import check, cut_of


LOADS = {
    "counts over rows": lambda sizes, chosen: sizes / chosen.size,
    "counts over their sum": lambda sizes, chosen: sizes / sizes.sum(),
    "one-hot": lambda sizes, chosen: jax.nn.one_hot(chosen, EXPERTS).mean((0, 1)),
}
LOOPS = "unroll", "checkpoint", "scan", "scan, checkpoint"


def step_of(load, loop="unroll", experts=EXPERTS):
    """Return a training step of which `experts` experts get all tokens."""

    def layer(p, x):
        logits = x @ p["router"] - 9.0 * (jnp.arange(EXPERTS) >= experts)
        gates = jax.nn.softmax(logits)
        weights, chosen = lax.top_k(gates, CHOICES)
        keys, flat = chosen.reshape(-1), weights.reshape(-1)
        order, sizes = jnp.argsort(keys), jnp.bincount(keys, length=EXPERTS)
        y = multiplied(p, x[order // CHOICES], sizes) * flat[order][:, None]
        out = x + jnp.zeros_like(x).at[order // CHOICES].add(y)
        return out, EXPERTS * jnp.sum(load(sizes, chosen) * gates.mean(0))

    run = jax.checkpoint(layer) if "checkpoint" in loop else layer

    def loss(p, data):
        x, total = data["x"].reshape(-1, WIDTH), jnp.zeros(())
        if "scan" in loop:
            x, each = lax.scan(lambda x, p: run(p, x), x, p)
            total = each.sum()
        else:
            for k in range(p["up"].shape[0]):
                x, each = run(jax.tree.map(lambda a, k=k: a[k], p), x)
                total += each
        return jnp.mean((x - data["y"].reshape(x.shape)) ** 2) + 0.1 * total

    def step(p, data):
        value, grads = jax.value_and_grad(loss)(p, data)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    return step


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("load", LOADS)
def test_losses_count_the_rows_of_all_micro_batches(load, loop):
    """One loop counts; the other sorts, multiplies, and knows the counts of all."""
    (cut,) = check(step_of(LOADS[load], loop), (params(2), batch()), counts=(3,))
    assert len(cut.loops) == 2 and cut.meeting_flops == 0


@pytest.mark.parametrize("experts", [CHOICES, EXPERTS - 1])
@pytest.mark.parametrize("loop", ["checkpoint", "scan"])
def test_some_experts_have_no_rows_and_some_micro_batches_fewer(loop, experts):
    step = step_of(LOADS["counts over rows"], loop, experts)
    check(step, (params(2), batch(7, 3)), counts=(2, 4))


def test_counts_in_three_layers_are_known_after_one_loop():
    step = step_of(LOADS["counts over rows"], "checkpoint")
    (cut,) = check(step, (params(3), batch()), counts=(2,))
    assert len(cut.loops) == 2 and len(cut.opened) == 3


def test_a_layer_that_scales_its_rows_by_counts_of_all_is_refused():
    """Each layer waits for the one before: where that is too often, the message says
    which line it is, and what to do."""

    def layer(p, x):
        keys = lax.top_k(x @ p["router"], CHOICES)[1].reshape(-1)
        order, sizes = jnp.argsort(keys), jnp.bincount(keys, length=EXPERTS)
        y = multiplied(p, x[order // CHOICES], sizes)
        y *= (sizes / keys.size)[keys[order]][:, None]
        return x + jnp.zeros_like(x).at[order // CHOICES].add(y)

    def step(p, data):
        def loss(p):
            x = data["x"].reshape(-1, WIDTH)
            for k in range(5):
                x = layer(jax.tree.map(lambda a, k=k: a[k], p), x)
            return jnp.mean(x**2)

        return jax.grad(loss)(p)

    found = cut_of(step, (params(5), batch()), most_loops=3)
    assert isinstance(found, CoupledBatchError)
    assert "test_balanced_rows.py" in found.where and "microbatches=1" in found.fix


@pytest.mark.parametrize("seed", covering(range(24), range(4)))
def test_random_mixtures(seed):
    """They run, or are refused; their numbers are never others."""
    step, args, _ = drawn(seed)
    found = cut_of(step, args)
    if isinstance(found, MicrobatchCut):
        check(step, args, counts=(2,))
    else:
        assert isinstance(found, MicrobatchError)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2, "mesh": {"x": 8}},
        {"microbatches": 4, "mesh": {"x": 2, "y": 4}},
        {"microbatches": 2, "mesh": {"stage": 2, "x": 4}},
    ],
)
@pytest.mark.parametrize("loop", ["checkpoint", "scan"])
def test_planned_and_run_it_equals_one_device(loop, options):
    step, args = step_of(LOADS["counts over rows"], loop), (params(2), batch(8))
    sharded = rhino.auto_shard(step, hardware="v5e:2x4", progress=False, **options)
    for a, b in zip(
        jax.tree.leaves(sharded(*args)), jax.tree.leaves(step(*args)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
