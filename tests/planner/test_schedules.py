"""When stages run: schedules of planned steps, compared by the clock."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.errors import ScheduleError, StageError


STAGES, COUNT = 4, 8
LAYERS, WIDTH, ROWS = 8, 16384, 65536
BUBBLE = (STAGES - 1) / (COUNT + STAGES - 1)


def loss(params, x):
    x = x * params["scale"]
    for p in params["layers"]:
        x = jnp.tanh(x @ p)
    return jnp.sum(x)


def train_step(params, x):
    """Layers that are alike, so wide that what they send counts for little."""
    gradients = jax.grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


@functools.cache
def planned(schedule, **options):
    def bf16(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = {"scale": bf16(WIDTH), "layers": [bf16(WIDTH, WIDTH)] * LAYERS}
    return rhino.plan(
        train_step,
        params,
        bf16(ROWS, WIDTH),
        mesh={"stage": STAGES},
        hardware="h100",
        schedule=schedule,
        donate_argnums=0,
        **{"microbatches": COUNT, **options},
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bubbles_are_those_of_the_formula(schedule):
    simulation = planned(schedule).simulate()
    assert simulation.bubble == pytest.approx(BUBBLE, rel=0.1)


@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        # Two chunks in every group: half of it, and what is sent twice as often.
        ("interleaved", 0.7),
        ("zero-bubble", 0.6),
        ("zero-bubble-v", 0.7),
        ("searched", 0.4),
    ],
)
def test_bubbles_are_smaller(schedule, most):
    plan = planned(schedule)
    assert plan.schedule == schedule
    assert 0 < plan.simulate().bubble < most * BUBBLE
    assert "one step" in plan.table()


def test_auto_takes_the_fastest_and_says_what_it_compared():
    plan = planned("auto")
    (note,) = [n for n in plan.notes if "schedules by" in n]
    names = ("1f1b", "gpipe", "kfkb", "interleaved", "zero-bubble", "searched")
    assert all(f"{name} " in note for name in names)
    assert f"taken: {plan.schedule}" in note
    others = [planned(name).predicted.step_time_s for name in names[:2]]
    assert plan.predicted.step_time_s < min(others)


def test_what_was_searched_for_is_kept(tmp_path):
    plan = planned("searched")
    assert len(plan.pipeline.orders) == STAGES
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.pipeline == plan.pipeline
    assert loaded.simulate().step_time_s == plan.predicted.step_time_s


def test_split_passes_hold_what_gradients_of_weights_need():
    whole, split = planned("1f1b"), planned("zero-bubble")
    assert split.pipeline.is_split and not whole.pipeline.is_split
    for cost in split.pipeline.costs:
        assert cost.weight_residual_bytes <= cost.activation_bytes
        assert cost.weights_s > 0 and cost.output_gradient_bytes > 0
    # As many micro-batches in flight as the first stage of 1F1B, on every stage.
    last = whole.simulate().group_peak_bytes[-1], split.simulate().group_peak_bytes[-1]
    assert last[0] < last[1]


def test_what_does_not_run_is_refused():
    with pytest.raises(ScheduleError, match="without a backward pass") as caught:
        planned("forward-only")
    assert caught.value.where == "`schedule=`"
    numbers = caught.value.numbers
    assert "zero-bubble" in numbers and "token-slices" in numbers
    with pytest.raises(ScheduleError, match="multiple"):
        planned("interleaved", microbatches=2)

    def scanned(params, x):
        def loss(params):
            h = x
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["loop"])
            return jnp.sum(h)

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    loop = jax.ShapeDtypeStruct((4, 16, 16), jnp.float32)
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    options = {"mesh": {"stage": 2, "data": 2}, "donate_argnums": 0}
    with pytest.raises(StageError, match="in one loop") as caught:
        rhino.plan(scanned, {"loop": loop}, x, schedule="interleaved", **options)
    assert "loop" in caught.value.where and caught.value.fix
