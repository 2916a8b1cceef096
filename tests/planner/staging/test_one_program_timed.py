"""The simulated step of stages that are one program, and what each of them holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from tests.planner.spmd_pipeline.helpers_one_program import (
    MESH,
    clipped,
    layer,
    planned,
    planned_clipped,
)


@pytest.fixture(scope="module")
def plan() -> Any:
    return planned_clipped()


def test_the_simulated_step_is_the_predicted_one(plan: Any) -> None:
    found = plan.simulate()
    assert found.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    assert found.peak_bytes == plan.predicted.peak_bytes
    there, back = plan.pipeline.passes
    assert not there.is_backward and not there.is_reversed
    assert back.is_backward and back.is_reversed
    # A layer of a product and its two gradients, made once more: three to one.
    assert 1.5 * there.tick_s < back.tick_s
    # One of five ticks is idle, of both passes; the rest of the step all do.
    idle = there.tick_s + back.tick_s
    handed = 4 * (there.send_s + back.send_s)
    expected = (idle + handed) / found.step_time_s
    assert found.bubble == pytest.approx(expected, rel=1e-6)
    assert plan.simulate(jitter=0.05).p95_s > found.step_time_s


def test_what_layers_hand_on_is_what_the_plan_sends(plan: Any) -> None:
    each = [c for c in plan.collectives if c.count == plan.pipeline.ticks]
    each = [c for c in each if c.kind == "collective-permute"]
    handed = sum(p.send_s for p in plan.pipeline.passes) * plan.pipeline.ticks
    assert handed == pytest.approx(sum(c.seconds for c in each))
    sizes = sum(p.send_bytes for p in plan.pipeline.passes) * plan.pipeline.ticks
    assert sizes == sum(c.bytes for c in each)


def test_every_stage_has_a_record(plan: Any) -> None:
    assert len(plan.stages) == 2
    first, last = plan.stages
    assert (first.layers, last.layers) == (((0, 2),), ((2, 4),))
    assert {*first.devices, *last.devices} == {*range(8)}
    for stage, at in ((first, 0), (last, 1)):
        own = [d.id for d in plan.mesh.devices[at].flat]
        assert [d.id for d in stage.mesh.devices.flat] == own
        every = [d.id for d in plan.mesh.devices.flat]
        assert [every[i] for i in stage.devices] == own
        assert stage.peak_bytes == plan.predicted.peak_bytes
    assert [s.to for s in first.sends] == [1] and [s.to for s in last.sends] == [0]
    assert first.sends[0].bytes == 5 * 4 * plan.pipeline.passes[0].send_bytes


@pytest.mark.slow
def test_the_axis_of_stages_may_be_any() -> None:
    step, args = clipped()
    plan = planned(step, args, {"data": 2, "stage": 2, "model": 2})
    for at, stage in enumerate(plan.stages):
        own = [d.id for d in plan.mesh.devices[:, at].flat]
        every = [d.id for d in plan.mesh.devices.flat]
        assert [every[i] for i in stage.devices] == own
        assert [d.id for d in stage.mesh.devices.flat] == own


def test_it_is_told_drawn_and_traced(plan: Any, tmp_path: Path) -> None:
    text = plan.table()
    assert "one-program, 4 micro-batches" in text
    assert "0 to 1" in text and "2 to 3" in text
    # One stage is idle while the other has the first micro-batch.
    assert re.search(r"1  M─*·+F(?:[·\d]+F){3}[·\d]*M", text)
    assert "B0" in text and "U─" in text
    html = plan._repr_html_()
    assert "stage 1" in html and "whole batch" in html
    plan.save_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    tasks = [e for e in events if e["ph"] == "X" and e["cat"] == "forward"]
    assert len(tasks) == 8
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} >= {
        "group 0",
        "group 1",
    }


def test_it_is_saved(plan: Any, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["stages"][1]["decisions"] == 0  # as of the first: written once
    again = rhino.load_plan(tmp_path / "plan.json")
    assert again.with_mesh(plan.mesh) == plan
    assert again.simulate().step_time_s == plan.simulate().step_time_s
    assert again.stages[0].decisions is again.stages[1].decisions


def test_a_forward_pass_alone_has_one_pass() -> None:
    def loss(params: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda c, w: (layer(c, w), None), x, params)
        return jnp.mean(x**2)

    _, args = clipped()
    plan = rhino.plan(
        loss,
        args[0]["layers"],
        args[2],
        mesh=MESH,
        schedule="one-program",
        microbatches=4,
        level="fast",
    )
    assert len(plan.pipeline.passes) == 1
    assert plan.simulate().step_time_s == pytest.approx(plan.predicted.step_time_s)
