"""What waits on hosts, by the clock."""

from __future__ import annotations

import json

import pytest

from rhino_jax.pipeline.jitter import Noise, jittered
from rhino_jax.pipeline.offload import moved, with_offload
from rhino_jax.pipeline.schedules.searched import make
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import label
from rhino_jax.plan.stages import StageCost
from tests.pipeline.chains import chain


LEFT, SENT, FIXED = 100, 80, 7
"""Bytes: of a micro-batch, of these what waits on the host, of a stage."""


def schedule(name="1f1b", stages=4, count=8, **options):
    cost = StageCost(
        forward_s=1.0, backward_s=2.0, activation_bytes=LEFT, fixed_bytes=FIXED
    )
    work = chain([cost] * stages, count, **options)
    return make(name, work)


def sent(found, bytes_per_s, stages=4):
    return with_offload(found, [SENT] * stages, bytes_per_s)


def test_a_device_holds_two_micro_batches_of_what_waits_on_its_host():
    found = schedule()
    before, after = simulate(found), simulate(sent(found, SENT))
    assert before.group_peak_bytes == tuple(FIXED + n * LEFT for n in (4, 3, 2, 1))
    rest = LEFT - SENT
    expected = [FIXED + n * rest + min(n, 2) * SENT for n in (4, 3, 2, 1)]
    assert after.group_peak_bytes == tuple(expected)
    # A link that moves a micro-batch in the time of a forward pass hides behind tasks,
    # but where warming up ends: there one fetch waits for what was computed last.
    assert after.step_time_s <= before.step_time_s + 1 + 1e-9
    # The last stage's backward passes follow their own forward passes.
    links = {link.name for link in after.schedule.graph.links}
    assert {f"{g} → host" for g in range(3)} <= links and "3 → host" not in links


def test_of_gpipe_what_is_held_no_longer_grows_with_micro_batches():
    for count in (4, 8, 16):
        found = schedule("gpipe", 2, count)
        peaks = simulate(sent(found, SENT, 2)).group_peak_bytes
        assert peaks == (FIXED + count * (LEFT - SENT) + 2 * SENT,) * 2


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "kfkb"])
def test_a_slow_link_is_waited_for_and_no_more_is_held(name):
    found = schedule(name)
    free = simulate(found)
    slow = [simulate(sent(found, SENT / s)) for s in (0.1, 1, 3, 6, 60)]
    times = [s.step_time_s for s in slow]
    assert times == sorted(times) and times[-1] > 10 * times[0]
    flights = [(peak - FIXED) // LEFT for peak in free.group_peak_bytes]
    most = [FIXED + n * (LEFT - SENT) + min(n, 2) * SENT for n in flights]
    for simulation in slow:
        pairs = zip(simulation.group_peak_bytes, most, strict=True)
        assert all(peak <= size for peak, size in pairs)
    # Each way, the link carries every micro-batch that leaves, one after the other.
    graph = slow[-1].schedule.graph
    out = [t for t in graph.transfers if t.is_to_host]
    assert times[-1] > 60 * sum(graph.receiver(t) == 0 for t in out)
    assert sum(slow[-1].exposed_s) > 60


def test_values_come_back_one_task_ahead():
    found = schedule()
    tasks = found.graph.tasks
    first = [m for m in moved(found, range(4)) if tasks[m.forward].group == 0]
    said = [(label(tasks[m.backward]), label(tasks[m.fetched_after])) for m in first]
    # F0 F1 F2 F3 B0 F4 B1 F5 …, and B4 B5 B6 B7 at the end.
    assert said[:3] == [("B0", "F3"), ("B1", "B0"), ("B2", "B1")]
    assert said[-2:] == [("B6", "B4"), ("B7", "B5")]
    assert moved(found, []) == []


def test_noise_and_traces_know_of_the_links(tmp_path):
    found = sent(schedule(), SENT)
    plain = simulate(found)
    quiet = Noise(task_sigma=0.0, link_sigma=0.0, samples=2)
    assert jittered(found, quiet).p50_s == pytest.approx(plain.step_time_s)
    assert "to and from host" in plain.table()
    assert "to and from host" not in simulate(schedule()).table()
    # Of all but the last stage, every backward pass comes later than next.
    assert plain.host_s == (8.0, 8.0, 8.0, 0.0)
    plain.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"0 → host", "host → 0"} <= names
    (place,) = {
        (e["pid"], e["tid"])
        for e in events
        if e["ph"] == "M" and e["args"]["name"] == "host → 0"
    }
    shown = [e["name"] for e in events if (e["pid"], e.get("tid")) == place]
    assert "B0" in shown and "F0" not in shown
