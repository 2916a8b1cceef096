"""Simulated steps as text, and as traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from rhino_jax.pipeline.schedules.searched import make
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import TransferLink
from rhino_jax.plan.stages import StageCost
from tests.pipeline.chains import chain


def step() -> Simulation:
    cost = StageCost(
        forward_s=1e-3, backward_s=2e-3, activation_bytes=1 << 20, fixed_bytes=1 << 20
    )
    link = TransferLink("", 1e9, 5e-4)
    work = chain([cost] * 3, 4, sent_bytes=1000, link=link)
    return simulate(make("1f1b", work))


EXPECTED = """\
1f1b: 22.0 ms a step, bubble 45.5 %
  0 F0─F1──F2─                     B0─────F3─B1─────       B2─────       B3─────
  1      F0──F1─          B0─────F2──B1─────   F3──B2─────      B3─────
  2           F0──B0─────F1─B1─────    F2─B2─────   F3──B3─────

  group     busy  bubble  waits for transfers  peak memory
      0  12.0 ms  45.5 %              1.50 ms     4.00 MiB
      1  12.0 ms  45.5 %              2.00 ms     3.00 MiB
      2  12.0 ms  45.5 %              1.50 ms     2.00 MiB"""


def test_a_step_as_text() -> None:
    assert step().table(80) == EXPECTED


def test_no_line_is_longer_than_asked_for() -> None:
    cost = StageCost(forward_s=1, backward_s=2)
    found = simulate(make("1f1b", chain([cost] * 12, 60)))
    lines = found.table().splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) == 1 + 12 + 1 + 13


def test_later_chunks_are_in_small_letters() -> None:
    cost = StageCost(forward_s=1, backward_s=2)
    text = simulate(make("interleaved", chain([cost] * 4, 2, groups=2))).table()
    assert "F0──" in text and "f0──" in text and "b1──" in text


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_trace_loads_with_the_times_of_the_step(tmp_path: Path, name: str) -> None:
    found = step()
    found.save_trace(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    data = gzip.decompress(data) if name.endswith(".gz") else data
    events = json.loads(data)["traceEvents"]
    tasks = [e for e in events if e["ph"] == "X" and e["cat"] != "transfer"]
    graph = found.schedule.graph
    assert len(tasks) == len(graph.tasks)
    for event, task, start in zip(tasks, graph.tasks, found.task_start_s, strict=True):
        assert event["dur"] == pytest.approx(task.seconds * 1e6)
        assert event["ts"] == pytest.approx(start * 1e6)
        assert event["pid"] == task.group
    assert max(e["ts"] + e["dur"] for e in tasks) == pytest.approx(
        found.step_time_s * 1e6
    )
    sent = [e for e in events if e["ph"] == "X" and e["cat"] == "transfer"]
    assert len(sent) == len(graph.transfers)
    assert all(e["dur"] == pytest.approx(501) for e in sent)
    held = [e["args"]["held"] for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert max(held) == found.group_peak_bytes[0]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"group 0", "group 2", "links", "0 → 1", "1 → 0"} <= names
