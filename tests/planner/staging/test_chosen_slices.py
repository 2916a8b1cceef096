"""Which slices sequences run in, and what they are estimated to take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.errors import MicrobatchError, RhinoError, ScheduleError
from rhino_jax.models import registry
from rhino_jax.pipeline.schedules.sequence_slices import read_schedule, slices_in
from rhino_jax.planner.staging.slices import Growth, units_of
from tests.helpers_causal import causal_step


def planned(schedule, batch=1, **options):
    """A GPT of long sequences, of which there are few."""
    workload = registry.get(
        "gpt-tiny-unrolled",
        optimizer="sgd",
        seq_len=4096,
        batch=batch,
        d_model=1024,
        num_heads=8,
        d_ff=4096,
        num_layers=4,
        vocab=1024,
        tied_embedding=False,
    )
    return rhino.plan(
        workload.step,
        *workload.abstract_args(),
        donate_argnums=workload.donate_argnums,
        schedule=schedule,
        hardware="h100",
        progress=False,
        **{"mesh": {"stage": 4}, "microbatches": batch, **options},
    )


def test_what_is_said_of_slices_is_read():
    known = ("auto", "token-slices")
    assert read_schedule("", "token-slices: 9, 7", known) == "token-slices:9,7"
    assert slices_in("token-slices:9,7") == ("token-slices", (9, 7))
    assert slices_in("token-slices:4") == ("token-slices", (4,))
    assert slices_in("token-slices") == ("token-slices", ())
    with pytest.raises(RhinoError, match="token-slices"):
        read_schedule("", "token-slice", known)


def test_pairs_of_tokens_grow_with_what_is_before():
    halves = [Growth.of((2.0, 4.0, 0.5), at, 0.5) for at in (0.0, 0.5)]
    assert halves == [0.5 + 1.0 + 1.0, 0.5 + 1.0 + 2.0]


@pytest.mark.parametrize(
    ("length", "count", "units"),
    [(4096, 4, 32), (4099, 4, 32), (96, 8, 32), (20, 2, 20), (33, 2, 32), (40, 40, 40)],
)
def test_slices_are_of_some_parts_of_a_sequence(length, count, units):
    assert units_of(length, count) == units


@pytest.mark.slow
def test_few_long_sequences_are_faster_in_slices():
    sliced = planned("token-slices", batch=2)
    usual = planned("1f1b", batch=2)
    lengths = sliced.pipeline.slices
    assert len(lengths) >= 3 and lengths[0] >= lengths[-1]
    assert sliced.predicted.step_time_s < 0.8 * usual.predicted.step_time_s


def test_programs_that_cannot_run_in_slices_are_refused():
    def loss(params, x):
        for w in params:
            scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", x @ w, x), axis=-1)
            x = x + jnp.einsum("bst,btd->bsd", scores, x)  # sees what comes later
        return jnp.mean(x**2)

    def train_step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    with pytest.raises(ScheduleError) as caught:
        rhino.plan(
            train_step,
            [f32(8, 8)] * 4,
            f32(4, 16, 8),
            mesh={"stage": 2},
            schedule="token-slices",
            donate_argnums=0,
        )
    error = caught.value
    assert "test_chosen_slices.py" in error.where and error.numbers and error.fix
    with pytest.raises(ScheduleError, match="no backward pass"):
        rhino.plan(
            loss,
            [f32(8, 8)] * 4,
            f32(4, 16, 8),
            mesh={"stage": 2},
            schedule="token-slices",
        )


def few_layers(batch, width=8, **options):
    """Causal layers on few long sequences, planned."""
    layer = {k: jax.ShapeDtypeStruct((width, width), jnp.float32) for k in "qkv"}
    data = jax.ShapeDtypeStruct((batch, 2048, width), jnp.float32)
    return rhino.plan(
        causal_step,
        [layer] * 4,
        {"x": data, "y": data},
        mesh={"stage": 4},
        donate_argnums=0,
        hardware="h100",
        progress=False,
        **options,
    )


@pytest.mark.slow
def test_sequences_run_in_slices_where_micro_batches_are_fewer_than_stages():
    plan = few_layers(1, 512, microbatches=1)
    assert plan.schedule == "token-slices" and plan.microbatches == 1
    assert len(plan.pipeline.slices) > 1


def test_many_slices_are_compared_for_deep_pipelines():
    assert units_of(4096, 32) == 32 and units_of(32768, 32) == 128


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (1, "auto"), (2, 1)])
def test_a_schedule_that_is_said_needs_two_micro_batches(rows, count):
    with pytest.raises(MicrobatchError, match="would be idle") as caught:
        few_layers(rows, schedule="gpipe", microbatches=count)
    two = "give two rows or more" if rows == 1 else "take two or more micro-batches"
    assert caught.value.fix == f'{two}; or schedule="token-slices"; or stages=1.'


@pytest.mark.parametrize("rows", [1, 4])
def test_inference_runs_in_one_micro_batch(rows):
    def forward(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    params = [jnp.eye(8) + i for i in range(4)]
    x = jnp.ones((rows, 8))
    step = rhino.auto_shard(forward, mesh={"stage": 2}, microbatches=1)
    assert np.allclose(step(params, x), forward(params, x))
    assert step.plan(params, x).schedule == "forward-only"


def test_one_micro_batch_that_is_not_causal_says_why():
    def loss(params, x):
        for w in params:
            x = x + jax.nn.softmax(x @ w @ jnp.swapaxes(x, 1, 2), axis=-1) @ x
        return jnp.mean(x**2)

    def train_step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    weight = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    data = jax.ShapeDtypeStruct((1, 16, 8), jnp.float32)
    with pytest.raises(MicrobatchError) as caught:
        rhino.plan(train_step, [weight] * 4, data, mesh={"stage": 2}, donate_argnums=0)
    assert "later" in caught.value.numbers
    assert "token-slices" not in caught.value.fix
