"""The predicted step in the format of Chrome's traces, which Perfetto reads."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING

from rhino_jax.explain.report.collectives import format_axes
from rhino_jax.explain.report.step import step_of
from rhino_jax.pipeline import trace
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.trace import Event, named


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData

_US = 1e6


def save_trace(plan: PlanData, path: str | PathLike[str]) -> None:
    """Write a plan's predicted step as a trace; for stages, the simulated pipeline.

    Args:
      plan: the plan.
      path: ends in `.json`, or in `.json.gz` for a compressed file.
    """
    if plan.pipeline is not None:
        trace.save(simulate(schedule_of(plan.pipeline)), path)
    else:
        trace.write(events(plan), path)


def events(plan: PlanData) -> Iterator[Event]:
    """Yield a track of compute, one of collectives per set of axes, and memory."""
    step = step_of(plan)
    yield named("process_name", 0, 0, f"{plan.program_name}, each device")
    yield named("thread_name", 0, 0, "compute")
    tracks = sorted({s.collective.axes for s in step.sent})
    for i, axes in enumerate(tracks, 1):
        yield named("thread_name", 0, i, f"collectives over {format_axes(axes)}")
    for work in step.work:
        if work.end_s > work.start_s:
            yield {
                "ph": "X",
                "name": work.name,
                "cat": "backward" if work.is_backward else "forward",
                "pid": 0,
                "tid": 0,
                "ts": work.start_s * _US,
                "dur": (work.end_s - work.start_s) * _US,
                "args": {"ops": work.ops, "FLOPs": work.flops},
            }
    for sent in step.sent:
        c = sent.collective
        yield {
            "ph": "X",
            "name": c.kind,
            "cat": "collective",
            "pid": 0,
            "tid": 1 + tracks.index(c.axes),
            "ts": sent.start_s * _US,
            "dur": (sent.end_s - sent.start_s) * _US,
            "args": {
                "bytes": c.bytes,
                "count": c.count,
                "hidden_us": sent.hidden_s * _US,
                "source": c.source,
                "reason": c.reason,
            },
        }
    held = step.memory or ((0.0, plan.predicted.peak_bytes),)
    for time, held_bytes in held:
        yield {
            "ph": "C",
            "name": "bytes",
            "pid": 0,
            "ts": time * _US,
            "args": {"held": held_bytes},
        }
