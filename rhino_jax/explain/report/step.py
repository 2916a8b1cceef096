"""The predicted step over time: compute, collectives, and live memory.

A plan has the seconds of compute and the live bytes of each source line in program
order (`Timeline`), the seconds of every collective, and those of all exposed
communication together. Each collective runs at the op that needs it, and the same share
of each is hidden behind the preceding compute. A loop's body stands once, for all its
trips. The step's end and its totals are the plan's.

`save_trace` writes the step in the format of Chrome's traces, which Perfetto reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Generic, TypeVar

from rhino_jax.errors import PlanFileError
from rhino_jax.explain.report.tables import format_axes
from rhino_jax.pipeline import simulation
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulation import Event, named
from rhino_jax.pipeline.simulator import simulate


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData
    from rhino_jax.plan.records import Collective, LineSpan, LoopSpan


Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class StepSpan(Generic[Record]):
    """Compute of one line, a collective, or a loop in a step.

    Attributes:
      of: the plan's record; of a collective, of all its runs together.
      start_s, end_s: seconds since the start of the step.
      hidden_s: seconds of a collective that overlap with compute.
    """

    of: Record
    start_s: float
    end_s: float
    hidden_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step of one device.

    Attributes:
      seconds: length of the step.
      work: compute, in order.
      sent: collectives, in order.
      loops: loops, outer ones first.
      memory: (seconds, bytes live from then on) at each change.
    """

    seconds: float
    work: tuple[StepSpan[LineSpan], ...]
    sent: tuple[StepSpan[Collective], ...]
    loops: tuple[StepSpan[LoopSpan], ...]
    memory: tuple[tuple[float, int], ...]


def step_of(plan: PlanData) -> DeviceStep | None:
    """Return the step of a plan of one program; None if the plan has no timeline."""
    spans, predicted = plan.timeline.spans, plan.predicted
    if not spans:
        return None
    firsts = [span.first_op for span in spans]
    sends: dict[int, list[Collective]] = defaultdict(list)
    for c in plan.collectives:
        at = len(spans) if c.op_id is None else bisect_right(firsts, c.op_id)
        sends[max(at - 1, 0)].append(c)
    whole_s = sum(span.seconds for span in spans)
    sent_s = sum(c.seconds for c in plan.collectives)
    shown_share = min(1.0, predicted.communication_s / sent_s) if sent_s else 0.0
    clock, work, sent = 0.0, [], []
    free: dict[tuple[str, ...], float] = {}
    for i, span in enumerate(spans):
        share = span.seconds / whole_s if whole_s else 1.0 / len(spans)
        work.append(StepSpan(span, clock, clock + share * predicted.compute_s))
        clock = work[-1].end_s
        for c in sends[i]:
            shown_s = c.seconds * shown_share
            start = max(free.get(c.axes, 0.0), clock - (c.seconds - shown_s))
            end = clock + shown_s
            sent.append(StepSpan(c, min(start, end), end, max(0.0, clock - start)))
            clock = free[c.axes] = end
    memory = tuple((w.start_s, w.of.live_bytes) for w in work)
    loops = tuple(_loops(plan, work))
    return DeviceStep(clock, tuple(work), tuple(sent), loops, memory)


def _loops(
    plan: PlanData, work: Sequence[StepSpan[LineSpan]]
) -> Iterator[StepSpan[LoopSpan]]:
    for loop in plan.timeline.loops:
        inside = [w for w in work if loop.first_op <= w.of.first_op <= loop.last_op]
        if inside:
            yield StepSpan(loop, inside[0].start_s, inside[-1].end_s)


_US = 1e6


def save_trace(plan: PlanData, path: str | PathLike[str]) -> None:
    """Write a plan's predicted step as a trace; for stages, the simulated pipeline.

    Args:
      plan: the plan.
      path: ends in `.json`, or in `.json.gz` for a compressed file.
    """
    if plan.pipeline is not None:
        simulate(schedule_of(plan.pipeline)).save_trace(path)
    else:
        simulation.write(events(plan), path)


def events(plan: PlanData) -> Iterator[Event]:
    """Yield tracks of compute, of loops, of collectives per set of axes, and of memory.

    Raises:
      PlanFileError: the plan has no timeline.
    """
    step = step_of(plan)
    if step is None:
        raise PlanFileError(
            "`plan.save_trace`: this plan has no timeline, which older versions of"
            " rhino_jax did not save.",
            where=f"the plan of `{plan.program_name}`",
            fix="plan again, and save that plan.",
        )
    yield named("process_name", 0, 0, f"{plan.program_name}, each device")
    yield named("thread_name", 0, 0, "compute")
    tracks = sorted({s.of.axes for s in step.sent})
    for i, axes in enumerate(tracks, 1):
        yield named("thread_name", 0, i, f"collectives over {format_axes(axes)}")
    if step.loops:
        yield named("thread_name", 0, len(tracks) + 1, "loops")
    for work in step.work:
        span = work.of
        amounts = {"ops": span.last_op - span.first_op + 1, "FLOPs": span.flops}
        kind = "backward" if span.is_backward else "forward"
        if work.end_s > work.start_s:
            yield _spent(span.source, kind, 0, work.start_s, work.end_s, amounts)
    for sent in step.sent:
        c = sent.of
        about = {
            "bytes": c.bytes,
            "count": c.count,
            "hidden_us": sent.hidden_s * _US,
            "source": c.source,
            "reason": c.reason,
        }
        track = 1 + tracks.index(c.axes)
        yield _spent(c.kind, "collective", track, sent.start_s, sent.end_s, about)
    for x in step.loops:
        about = {"trips": x.of.trip_count}
        track = len(tracks) + 1
        yield _spent(x.of.source, "loop", track, x.start_s, x.end_s, about)
    for time, live_bytes in step.memory:
        yield {
            "ph": "C",
            "name": "bytes",
            "pid": 0,
            "ts": time * _US,
            "args": {"live": live_bytes},
        }


def _spent(
    name: str, kind: str, track: int, start_s: float, end_s: float, about: Event
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": 0,
        "tid": track,
        "ts": start_s * _US,
        "dur": (end_s - start_s) * _US,
        "args": about,
    }
