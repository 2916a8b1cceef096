"""A step of a pipeline as a drawing."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.explain.report import stages as view
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulator import simulate


def step(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


@pytest.fixture(scope="module")
def plan() -> Any:
    params = [jax.ShapeDtypeStruct((64, 64), "float32")] * 4
    x = jax.ShapeDtypeStruct((32, 64), "float32")
    options = {"schedule": "1f1b", "microbatches": 4, "progress": False}
    return rhino.plan(step, params, x, mesh={"stage": 2}, hardware="cpu", **options)


def test_every_task_has_a_box_where_it_runs(plan: Any) -> None:
    times = simulate(schedule_of(plan.pipeline))
    drawn = view.timeline(times)
    for group, order in enumerate(times.schedule.orders):
        (row,) = re.findall(rf">stage {group}</div>(.*?)</div></div>", drawn)
        boxes = re.findall(r"left:([\d.]+)%;width:([\d.]+)%", row)
        wanted = [
            (times.task_start_s[i], times.task_end_s[i] - times.task_start_s[i])
            for i in order
        ]
        assert len(boxes) == len([s for _, s in wanted if s])
        for box, (start, seconds) in zip(boxes, wanted, strict=True):
            left, width = (float(x) / 100 * times.step_time_s for x in box)
            assert left == pytest.approx(start, abs=1e-4 * times.step_time_s)
            assert width == pytest.approx(seconds, abs=1e-3 * times.step_time_s)


def test_pages_have_it_instead_of_the_lines_of_text(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "F0─" in plan.table() and "F0─" not in plan._repr_html_()
    assert 'title="F0: forward, ' in plan._repr_html_()
    monkeypatch.setattr(view, "MAX_TASKS", 3)
    assert "F0─" in plan._repr_html_()
