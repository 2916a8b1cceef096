"""The predicted step by the clock, and as a trace that is read back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.errors import PlanFileError
from rhino_jax.explain.report.step import DeviceStep, step_of
from rhino_jax.explain.report.views.views import memory, timeline, views_of
from rhino_jax.units import format_bytes
from tests.plan.samples import sample_plan


def step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        h = jax.nn.relu(batch @ p["up"])
        return jnp.mean((h @ p["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.fixture(scope="module")
def plan() -> Any:
    shapes = {"up": (64, 256), "down": (256, 64)}
    params = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes.items()}
    batch = jax.ShapeDtypeStruct((512, 64), "float32")
    mesh = {"data": 4, "model": 2}
    pins = {"params['up']": jax.P(None, "model"), "batch": jax.P("data")}
    return rhino.plan(step, params, batch, mesh=mesh, pins=pins, progress=False)


def test_the_step_takes_what_the_plan_predicts(plan: Any) -> None:
    found = step_of(plan)
    assert found.seconds == pytest.approx(plan.predicted.step_time_s, rel=0.01)
    assert len(found.sent) == len(plan.collectives) > 0
    assert max(b for _, b in found.memory) == plan.predicted.peak_bytes
    assert all(w.start_s <= w.end_s for w in found.work)
    for sent in found.sent:
        assert 0 <= sent.start_s <= sent.end_s <= found.seconds * 1.001
        assert 0 <= sent.hidden_s <= sent.of.seconds * 1.001


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_trace_reads_back(plan: Any, tmp_path: Path, name: str) -> None:
    plan.save_trace(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    events = json.loads(text)["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    wanted = {f"collectives over {' × '.join(c.axes)}" for c in plan.collectives}
    assert tracks == {"compute", *wanted}
    sent = [e for e in events if e.get("cat") == "collective"]
    assert sum(e["args"]["bytes"] for e in sent) == sum(
        c.bytes for c in plan.collectives
    )
    assert any(e["ph"] == "C" for e in events)
    ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X"]
    assert max(ends) == pytest.approx(plan.predicted.step_time_s * 1e6, rel=0.01)


def events(plan: Any, folder: Path) -> Any:
    plan.save_trace(folder / "step.json")
    return json.loads((folder / "step.json").read_text())["traceEvents"]


def test_a_plan_from_a_file_has_the_same_step(plan: Any, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert step_of(loaded) == step_of(plan)
    assert events(loaded, tmp_path) == events(plan, tmp_path)
    drawn = [view for view in views_of(plan) if view.title != "the program, by line"]
    assert views_of(loaded) == tuple(drawn)


def test_a_cached_plan_has_the_same_step(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RHINO_CACHE", "1")
    monkeypatch.setenv("RHINO_CACHE_DIR", str(tmp_path))
    args = looped, *arguments()
    first, cached = (rhino.plan(*args, mesh=MESH, progress=False) for _ in range(2))
    assert cached.cached and not first.cached
    assert step_of(cached) == step_of(first)


def test_a_plan_without_a_timeline_draws_none(tmp_path: Path) -> None:
    plan = sample_plan()
    assert {"one step, by the clock", "memory over the step"}.isdisjoint(
        view.title for view in views_of(plan)
    )
    with pytest.raises(PlanFileError, match="no timeline"):
        plan.save_trace(tmp_path / "step.json")


MESH = {"data": 2}
LAYERS, WIDTH, ROWS = 6, 64, 4096


def looped(stack: Any, x: Any) -> Any:
    def loss(stack: Any) -> Any:
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, stack)
        return jnp.mean(y**2)

    return stack - jax.grad(loss)(stack)


def arguments() -> tuple[Any, Any]:
    shapes = (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)
    a, b = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    return a, b


def test_a_scans_stacks_are_live_from_the_loops_start() -> None:
    plan = rhino.plan(looped, *arguments(), mesh=MESH, progress=False)
    found = step_of(plan)
    assert found is not None
    forward, backward = found.loops
    assert [x.of.trip_count for x in found.loops] == [LAYERS, LAYERS]
    assert 0 <= forward.start_s < forward.end_s <= backward.start_s < backward.end_s
    live = dict(found.memory)
    saved = LAYERS * ROWS // 2 * WIDTH * 4  # the carries that the backward pass reads
    assert live[forward.start_s] >= saved
    assert max(live.values()) == plan.predicted.peak_bytes
    assert "6 trips" in timeline(found)


def test_a_loop_within_a_loop_has_a_track_of_its_own() -> None:
    def microbatches(stack: Any, batches: Any) -> Any:
        return jax.lax.scan(lambda s, x: (looped(s, x), None), stack, batches)[0]

    stack, x = arguments()
    batches = jax.ShapeDtypeStruct((3, *x.shape), "float32")
    plan = rhino.plan(microbatches, stack, batches, mesh=MESH, progress=False)
    found = step_of(plan)
    assert found is not None
    outer, *inner = found.loops
    assert [x.of.trip_count for x in inner] == [LAYERS, LAYERS]
    assert outer.of.trip_count == 3
    assert outer.start_s <= inner[0].start_s < inner[1].end_s <= outer.end_s
    drawn = timeline(found)
    assert drawn.count("6 trips of") == 2 and drawn.count("3 trips of") == 1
    assert drawn.count(">loops</div>") == 2


def test_the_curve_has_an_axis_and_the_budgets_line() -> None:
    plan = rhino.plan(looped, *arguments(), mesh=MESH, progress=False)
    found = step_of(plan)
    assert found is not None
    peak = plan.predicted.peak_bytes
    near = memory(found, 2 * peak)
    assert near.count("<line") == 2 and f">budget {format_bytes(2 * peak)}<" in near
    assert f">peak {format_bytes(peak)}<" in near and ">0</div>" in near
    spike = DeviceStep(1.0, (), (), (), ((0.0, 10), (0.5, 80), (0.5004, 20)))
    assert " 1000,97.8 1000,120" in memory(spike, 100)  # 20 of 108, to the end
    far = memory(found, 1000 * peak)
    assert far.count("<line") == 1 and "beyond the axis" in far


@pytest.mark.parametrize("schedule", ["1f1b", "one-program"])
def test_plans_in_stages_have_the_timeline_of_their_program(
    schedule: str, tmp_path: Path
) -> None:
    axes, options = {"stage": 2, "data": 2}, {"schedule": schedule, "level": "fast"}
    stack, x = arguments()
    plan = rhino.plan(looped, stack, x, mesh=axes, progress=False, **options)
    found = step_of(plan)
    assert (found is None) == plan.has_tasks == (schedule == "1f1b")
    if found is not None:
        assert found.seconds == pytest.approx(plan.predicted.step_time_s)
        assert len(found.sent) == len(plan.collectives)
    assert [e for e in events(plan, tmp_path) if e["ph"] == "X"]
