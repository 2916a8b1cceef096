"""Plans of several stages for steps whose micro-batches are coupled."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import pytest
from helpers_coupled import STEPS, arguments

import rhino_jax as rhino
from rhino_jax.errors import ScheduleError
from rhino_jax.models import registry
from rhino_jax.pipeline.tasks import TaskKind
from rhino_jax.units import format_seconds
from tests.cases import covering, without_reserve


MESH = {"stage": 2}


def two_steps(step):
    params, batch = arguments()
    losses = []
    for _ in range(2):
        params, value = step(params, batch)
        losses.append(float(value))
    return params, losses


@cache
def two_steps_of_one_device(name):
    return two_steps(jax.jit(STEPS[name]))


def assert_equal(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    covering(
        [
            ("normed", {"mesh": MESH, "schedule": "gpipe"}),
            ("balanced", {"mesh": MESH, "schedule": "zero-bubble"}),
            ("balanced", {"mesh": {"stage": 2, "data": 2}}),
            ("adversarial", {"mesh": MESH}),
            ("contrastive", {"stages": 2}),
            ("contrastive", {"stages": [4, 2, 2], "schedule": "gpipe"}),
            ("contrastive", {"mesh": MESH, "schedule": "interleaved"}),
            ("balanced", {"mesh": {"stage": 4, "data": 2}, "schedule": "gpipe"}),
            ("balanced", {"mesh": {"stage": 4, "data": 2}, "schedule": "zero-bubble"}),
            ("weighted", {"mesh": {"stage": 2, "data": 2}}),
            ("weighted", {"mesh": MESH, "schedule": "searched"}),
            ("adversarial", {"mesh": {"stage": 2, "data": 2}}),
            ("adversarial", {"mesh": MESH, "schedule": "zero-bubble-v"}),
            ("hardest", {"mesh": MESH}),
        ],
    ),
    ids=str,
)
def test_two_steps_are_those_of_one_device(name, options):
    step = rhino.auto_shard(
        STEPS[name], donate_argnums=0, microbatches=4, level="fast", **options
    )
    assert_equal(two_steps(step), two_steps_of_one_device(name))
    plan = step.last_plan
    wanted = options.get("schedule", "gpipe")
    assert (plan.schedule, plan.microbatches) == (wanted, 4)
    assert plan.pipeline.is_split == wanted.startswith("zero-bubble")
    assert len(plan.stages) > 1 and len(plan.pipeline.between) == len(plan.stages)


@pytest.fixture(scope="module")
def plan():
    return rhino.plan(
        STEPS["contrastive"],
        *arguments(),
        mesh=MESH,
        microbatches=4,
        donate_argnums=0,
        level="fast",
    )


@pytest.mark.slow
def test_a_saved_plan_runs_as_well(plan, tmp_path):
    assert plan.schedule == "gpipe"
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.pipeline == plan.pipeline
    step = loaded.jit(STEPS["contrastive"], donate_argnums=0)
    assert_equal(two_steps(step), two_steps_of_one_device("contrastive"))


def test_backward_passes_wait_for_all_forward_passes(plan):
    simulation = plan.simulate()
    tasks = simulation.schedule.graph.tasks
    starts, ends = simulation.task_start_s, simulation.task_end_s
    of = {kind: [i for i, t in enumerate(tasks) if t.kind is kind] for kind in TaskKind}
    assert len(of[TaskKind.FORWARD]) == len(of[TaskKind.BACKWARD]) == 8
    assert len(of[TaskKind.BETWEEN]) == 2
    last = max(ends[i] for i in of[TaskKind.FORWARD])
    assert all(
        starts[i] >= last for i in (*of[TaskKind.BETWEEN], *of[TaskKind.BACKWARD])
    )
    assert sum(one.seconds for one in plan.pipeline.between) > 0
    table = plan.table()
    assert "of the whole batch M" in table
    assert "forward  whole batch  backward" in table
    for one in plan.pipeline.between:
        assert f"  {format_seconds(one.seconds)}  " in table


@pytest.mark.slow
def test_compiled_tasks_are_those_of_the_plan(plan):
    found = plan.verify(STEPS["contrastive"], *arguments())
    assert found.compiled.step_time_s > 0
    assert found.between


def large():
    """What micro-batches leave is more than state."""
    params, batch = jax.eval_shape(arguments)
    rows = {
        k: jax.ShapeDtypeStruct((4096, *x.shape[1:]), x.dtype) for k, x in batch.items()
    }
    return params, rows


def of_rows():
    """Numbers of that size."""
    rng = np.random.default_rng(0)
    rows = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), large()[1])
    return arguments()[0], rows


@cache
def planned(**options):
    return rhino.plan(
        STEPS["balanced"],
        *large(),
        mesh=MESH,
        hardware=without_reserve("cpu"),
        microbatches=16,
        donate_argnums=0,
        level="fast",
        **options,
    )


@pytest.mark.slow
def test_with_less_memory_backward_passes_run_them_once_more():
    plan = planned(memory_budget_bytes="2500KiB")
    assert plan.schedule == "gpipe" and plan.pipeline.is_recomputed
    assert plan.predicted.peak_bytes <= 2500 * 2**10
    assert plan.check(STEPS["balanced"], *of_rows()).ok


@pytest.mark.parametrize("schedule", ["1f1b", "kfkb"])
def test_schedules_with_early_backward_passes_are_refused(schedule):
    with pytest.raises(ScheduleError, match="before all forward passes") as refused:
        planned(schedule=schedule)
    assert 'take "gpipe", or "auto"' in refused.value.fix


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "schedule"),
    [
        (2, "auto"),
        *((s, k) for s in (2, 4) for k in ("zero-bubble", "interleaved", "searched")),
    ],
)
@pytest.mark.parametrize("name", ["moe-tiny", "two-tower-tiny"])
def test_models_of_the_zoo_are_checked_against_one_device(name, stages, schedule):
    workload = registry.get(name, optimizer="sgd")
    args, donated = workload.make_args(jax.random.key(0)), workload.donate_argnums
    plan = rhino.plan(
        workload.step,
        *args,
        mesh={"stage": stages, "data": 2},
        microbatches=4,
        schedule=schedule,
        donate_argnums=donated,
        level="fast",
    )
    found = plan.check(workload.step, *args)
    # The bias of a key shifts all scores of a row alike: its gradient is noise.
    wrong = [x for x in found.leaves if not x.ok and "['k']['bias']" not in x.path]
    assert found.leaves and not wrong
