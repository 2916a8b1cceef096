"""Steps in stages whose sequences run in slices, as users run them."""

from __future__ import annotations

import helpers_steps
import jax
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.errors import ScheduleError
from rhino_jax.models import registry
from tests.helpers_causal import causal_step
from tests.runtime.stand_in import normal


def workload_of(model="gpt-tiny-unrolled", **overrides):
    return registry.get(model, **{"optimizer": "sgd", **overrides})


def two_steps(step, workload):
    params, state, batch = workload.make_args(jax.random.key(0))
    losses = []
    for _ in range(2):
        params, state, *rest = step(params, state, batch)
        losses.append(float(rest[0]))
    return params, losses


def assert_steps_equal(workload, **options):
    step = rhino.auto_shard(
        workload.step, donate_argnums=workload.donate_argnums, **options
    )
    assert_equal(two_steps(step, workload), workload)
    return step.last_plan


def assert_equal(got, workload):
    want = two_steps(jax.jit(workload.step), workload)
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        a, b = np.asarray(a), np.asarray(b)
        if "qkv_bias" in jax.tree_util.keystr(path):
            # The bias of a key shifts all scores of a row alike: its gradient is noise.
            a, b = (np.take(x, [0, 2], axis=-3) for x in (a, b))
        # Adam divides gradients by their size: of a few near 0 rounding shows, which
        # differs between CPUs, in 1F1B of whole sequences too.
        adam = workload.config.optimizer == "adamw"
        far = ~np.isclose(a, b, rtol=1e-4, atol=3e-5 if adam else 1e-6)
        assert far.mean() <= (1e-3 if adam else 0)
        assert np.abs(a - b).max() <= 0.1 * workload.config.learning_rate or not adam


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (
            {"num_layers": 1, "d_model": 32, "d_ff": 64, "num_heads": 2},
            {"mesh": {"stage": 2}, "microbatches": 2, "schedule": "token-slices:17,15"},
        ),
        ({}, {"stages": 2, "microbatches": 2, "schedule": "token-slices:13,10,9"}),
        ({}, {"mesh": {"stage": 2}, "microbatches": 1, "schedule": "token-slices:2"}),
        ({}, {"mesh": {"stage": 4}, "microbatches": 1, "schedule": "token-slices:4"}),
        ({}, {"mesh": {"stage": 2, "data": 2}, "schedule": "token-slices"}),
        # Layers in a scan, under `jax.checkpoint`: stacks lie over both stages.
        (
            {"model": "gpt-tiny"},
            {"mesh": {"stage": 2}, "schedule": "token-slices:18,14"},
        ),
        # One sequence, of which nothing is said.
        (
            {"batch": 1, "num_layers": 2, "optimizer": "adamw"},
            {"mesh": {"stage": 2}, "microbatches": 1},
        ),
        (
            {"optimizer": "adamw", "clip_norm": 0.5},
            {"mesh": {"stage": 4}, "microbatches": 2, "schedule": "token-slices:17,15"},
        ),
    ],
    ids=str,
)
def test_two_steps_of_many_kinds_are_those_of_one_device(overrides, options):
    plan = assert_steps_equal(workload_of(**overrides), **options)
    assert sum(plan.pipeline.slices) == 32 and len(plan.pipeline.slices) > 1


def causal_arguments():
    params = [
        {name: normal(3 * i + k, 8, 8) / 8 for k, name in enumerate("qkv")}
        for i in range(2)
    ]
    return params, {"x": normal(8, 4, 12, 8), "y": normal(9, 4, 12, 8)}


def planned(schedule="token-slices:7,5"):
    return rhino.plan(
        causal_step,
        *causal_arguments(),
        mesh={"stage": 2},
        microbatches=2,
        schedule=schedule,
        donate_argnums=0,
    )


@pytest.fixture(scope="module")
def plan():
    return planned()


def test_plans_in_slices_are_shown_and_simulated(plan):
    assert plan.pipeline.slices == (7, 5)
    assert "of 7 + 5 tokens" in plan.table() and "token-slices, 2" in plan.table()
    simulation = plan.simulate()
    assert simulation.step_time_s == plan.predicted.step_time_s
    graph = simulation.schedule.graph
    per_micro_batch = [t for t in graph.tasks if t.kind.is_per_micro_batch]
    assert len(per_micro_batch) == 2 * 2 * 2 * 2  # passes, stages, slices, batches
    assert "B1.1" in simulation.table(400)


def test_two_steps_of_a_saved_plan_are_those_of_one_device(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.pipeline == plan.pipeline
    step = loaded.jit(causal_step, donate_argnums=0)
    got = helpers_steps.two_steps(step, causal_arguments)
    expected = helpers_steps.two_steps(jax.jit(causal_step), causal_arguments)
    helpers_steps.assert_equal(got, expected)


@pytest.mark.parametrize(
    ("schedule", "what", "numbers", "fix"),
    [
        ("token-slices:13", "too short for 13 slices", "12 tokens", "up to 12"),
        ("token-slices:9,8", "do not sum up", "9 + 8 = 17", "token-slices:9,3"),
        ("token-slices:1", "neither how many", "'1'", "token-slices:512,384,128"),
        ("token-slices:8,0", "neither how many", "'8,0'", "token-slices:4"),
        ("token-slices:a", "neither how many", "'a'", "token-slices:4"),
    ],
)
def test_slices_that_cannot_be_are_refused(schedule, what, numbers, fix):
    with pytest.raises(ScheduleError, match=what) as caught:
        planned(schedule)
    assert caught.value.where == "`schedule=`"
    assert numbers in caught.value.numbers and fix in caught.value.fix
