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
from rhino_jax.explain.report.step import step_of
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
        assert 0 <= sent.hidden_s <= sent.collective.seconds * 1.001


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


def test_a_plan_from_a_file_has_a_step_too(tmp_path: Path) -> None:
    plan = sample_plan()
    plan.save_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "collective"]
