"""Stages that run their forward passes again in their backward passes."""

from __future__ import annotations

import functools

import helpers_coupled
import jax
import jax.numpy as jnp
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.passes.staged.holding import TaskResiduals
from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.step import StagedStep, TaskKind, ValueKind
from tests.cases import covering
from tests.passes.staged.helpers_staged import check, of_zoo
from tests.passes.zoo import random_like, shape


WIDTH, ROWS, LAYERS = 32, 16, 8


def loss(params, key, x, noise=True, callback=False):
    h = x
    for i, w in enumerate(params):
        h = jnp.tanh(h @ w)
        if noise:
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, h.shape)
            h = jnp.where(keep, h / 0.8, 0)
        if callback and i == 1:
            h = h * _doubled(jax.lax.stop_gradient(h))
    return jnp.mean((h - x) ** 2)


def _doubled(h):
    return jax.pure_callback(lambda a: 2 * a, jax.ShapeDtypeStruct(h.shape, h.dtype), h)


def step_of(loss):
    def step(params, key, x):
        value, gradients = jax.value_and_grad(loss)(params, key, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def arguments():
    params, x = random_like(([shape(WIDTH, WIDTH)] * LAYERS, shape(ROWS, WIDTH)))
    return params, jax.random.key(0), x


@functools.cache
def traced(loss, **options):
    args = arguments()
    step = step_of(lambda *xs: loss(*xs, **options))
    return trace(step, args, {}, donate_argnums=(0,)), jax.tree.leaves(args)


def left_bytes(step: StagedStep) -> list[int]:
    found = []
    for chunk, group in enumerate(step.chunks):
        keys, _, _ = TaskResiduals.of(step.tasks[group]).of_chunk(chunk)
        types = [step.types[key] for key in keys]
        found.append(sum(t.size * t.dtype.itemsize for t in types))
    return found


@pytest.mark.parametrize(
    ("stages", "v", "is_compiled"),
    covering([(2, 1, False), (4, 1, False), (2, 2, False), (2, 2, True)], 3),
    ids=str,
)
def test_what_is_dropped_is_the_same_when_it_is_made_again(stages, v, is_compiled):
    args = traced(loss)
    kept = check(*args, stages, 4, is_compiled, v=v)
    remat = StagedRemat(frozenset(range(v * stages)))
    again = check(*args, stages, 4, is_compiled, v=v, remat=remat)
    row = 4 * ROWS // 4 * WIDTH
    assert left_bytes(again) == [0, *[row] * (v * stages - 1)]
    assert all(a > 2 * row for a in left_bytes(kept))


def test_only_chunks_that_are_asked_for_run_again():
    args = traced(loss)
    kept = left_bytes(check(*args, 4, 4))
    some = left_bytes(check(*args, 4, 4, remat=StagedRemat(frozenset([1]))))
    assert some[1] < kept[1] and (some[0], *some[2:]) == (kept[0], *kept[2:])


def test_callbacks_do_not_run_again():
    args = traced(loss, noise=False, callback=True)
    again = check(*args, 2, 4, remat=StagedRemat(frozenset([0, 1])))
    ran = {
        task.kind
        for tasks in again.tasks
        for task in tasks
        if "callback" in str(jaxpr_of(again, task))
    }
    assert ran == {TaskKind.BETWEEN}


def jaxpr_of(step, task):
    return jax.make_jaxpr(task.run)(*(step.types[key] for key in task.reads))


def test_what_is_checkpointed_by_layers_is_kept_for_one_micro_batch_alone():
    def checkpointed(params, key, x):
        h = x
        for w in params:
            h = jax.checkpoint(lambda h, w: jnp.tanh(jnp.tanh(h @ w) @ w))(h, w)
        return jnp.mean((h - x) ** 2)

    args = traced(checkpointed)
    row = 4 * ROWS // 4 * WIDTH
    assert left_bytes(check(*args, 2, 4))[0] >= 3 * row
    assert left_bytes(check(*args, 2, 4, remat=StagedRemat(frozenset([0, 1]))))[0] == 0


def test_coupled_micro_batches_are_recomputed_too():
    args = random_like(jax.eval_shape(helpers_coupled.arguments))
    step = helpers_coupled.STEPS["contrastive"]
    args = trace(step, args, {}, donate_argnums=(0,)), jax.tree.leaves(args)
    kept = left_bytes(check(*args, 2, 4))
    again = left_bytes(check(*args, 2, 4, remat=StagedRemat(frozenset([0, 1]))))
    assert sum(again) < sum(kept)


@pytest.mark.parametrize(
    ("name", "options", "stages"),
    covering(
        [
            (name, options, stages)
            for name, options in (
                ("gpt-tiny-unrolled", {}),
                ("gpt-tiny-unrolled", {"clip_norm": 0.5}),
                ("t5-tiny", {}),
                ("unet-tiny", {}),
            )
            for stages in (2, 4)
        ]
    ),
    ids=str,
)
def test_models_of_the_zoo_are_the_same_when_stages_recompute(name, options, stages):
    args = of_zoo(name, **options)
    again = check(*args, stages, 4, remat=StagedRemat(frozenset(range(stages))))
    received = [
        {s.key for s in again.sends if s.target == g and s.key.kind is ValueKind.INSIDE}
        for g in range(stages)
    ]
    for g in range(stages):
        keys, _, _ = TaskResiduals.of(again.tasks[g]).of_chunk(g)
        assert keys <= received[g]
