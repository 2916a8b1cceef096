"""The predicted step over time: compute, collectives, and live memory.

A plan predicts a step's seconds of compute, of every collective, and of all exposed
communication together. Ops run in program order. Each takes its share of compute by
FLOPs, each collective runs at the op that needs it, and the same share of each is
hidden behind the preceding compute. Memory is that of the live values, by their specs,
scaled to the predicted peak. The step's end and its totals are therefore the plan's;
the order in between is an illustration.

`save_trace` writes the step in the format of Chrome's traces, which Perfetto reads.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from rhino_jax.explain.report.tables import format_axes
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import share_of
from rhino_jax.pipeline import simulation
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulation import Event, named
from rhino_jax.pipeline.simulator import simulate


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData
    from rhino_jax.plan.records import Collective


_OP = re.compile(r" #(\d+)$")


@dataclass(frozen=True, slots=True)
class LineCompute:
    """Compute of one source line of the program.

    Attributes:
      name: the source line.
      start_s, end_s: seconds since the start of the step.
      ops: number of ops.
      flops: FLOPs of all of them, on one device.
      is_backward: whether differentiation produced them.
    """

    name: str
    start_s: float
    end_s: float
    ops: int
    flops: float
    is_backward: bool


@dataclass(frozen=True, slots=True)
class StepCollective:
    """A collective in a step.

    Attributes:
      collective: the plan's record, all its runs together.
      start_s, end_s: seconds since the start of the step.
      hidden_s: seconds of it that overlap with compute.
    """

    collective: Collective
    start_s: float
    end_s: float
    hidden_s: float


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step of one device.

    Attributes:
      seconds: length of the step.
      work: compute, in order.
      sent: collectives, in order.
      memory: (seconds, live bytes) at each change; empty for a plan that was read from
        a file.
    """

    seconds: float
    work: tuple[LineCompute, ...]
    sent: tuple[StepCollective, ...]
    memory: tuple[tuple[float, int], ...]


def program_of(plan: PlanData) -> Program | None:
    """Return the program that a plan's op ids refer to; None if it is not available."""
    traced = plan.traced
    for transform in plan.transforms:
        if traced is not None and transform.choice:
            traced = traced.after_passes.get((transform.name, transform.choice))
    return None if traced is None else traced.program


def step_of(plan: PlanData) -> DeviceStep:
    """Return the simulated step of a plan of one stage."""
    program = program_of(plan)
    asked: dict[int, list[Collective]] = defaultdict(list)
    last = len(program.ops) if program is not None else 0
    for c in plan.collectives:
        found = _OP.search(c.op)
        number = int(found[1]) if found is not None else last
        asked[min(number, last)].append(c)
    if program is None:
        return _run(plan, [_Line("compute", 1, 1.0, False, sorted(asked))], asked, ())
    lines = [*_lines(program, asked)]
    held = _held(plan, program)
    return _run(plan, lines, asked, held)


@dataclass(slots=True)
class _Line:
    name: str
    ops: int
    flops: float
    is_backward: bool
    asked: list[int]
    last: int = 0


def _lines(program: Program, asked: dict[int, list[Collective]]) -> Iterator[_Line]:
    """Yield ops in order, consecutive ones of one source line merged."""
    line: _Line | None = None
    for rank, (op, count) in enumerate(program.walk()):
        name, back = str(op.source), op.source.is_backward
        has_asked = op.id in asked
        if line is None or (line.name, line.is_backward) != (name, back) or line.asked:
            if line is not None:
                yield line
            line = _Line(name, 0, 0.0, back, [])
        line.ops += 1
        line.last = rank
        line.flops += (0.0 if op.call else op.flops) * count
        if has_asked:
            line.asked.append(op.id)
    if line is not None:
        yield line
    if len(program.ops) in asked:
        count = len(program.ops)
        yield _Line("end of the step", 0, 0.0, False, [count], count)


def _run(
    plan: PlanData,
    lines: list[_Line],
    asked: dict[int, list[Collective]],
    held: tuple[tuple[int, int], ...],
) -> DeviceStep:
    predicted = plan.predicted
    whole = sum(line.flops for line in lines)
    sent_s = sum(c.seconds for c in plan.collectives)
    shown_share = min(1.0, predicted.communication_s / sent_s) if sent_s else 0.0
    clock, work, sent = 0.0, [], []
    at_op: dict[int, float] = {}  # position in `Program.walk` → end, in seconds
    free: dict[tuple[str, ...], float] = {}
    for line in lines:
        share = line.flops / whole if whole else 1.0 / len(lines)
        end = clock + share * predicted.compute_s
        flops = share * predicted.flops_per_device
        work.append(
            LineCompute(line.name, clock, end, line.ops, flops, line.is_backward)
        )
        clock = at_op[line.last] = end
        for c in (c for op in line.asked for c in asked[op]):
            shown_s = c.seconds * shown_share
            start = max(free.get(c.axes, 0.0), clock - (c.seconds - shown_s))
            end = clock + shown_s
            sent.append(
                StepCollective(c, min(start, end), end, max(0.0, clock - start))
            )
            clock = free[c.axes] = end
    memory = _by_clock(held, at_op)
    return DeviceStep(clock, tuple(work), tuple(sent), memory)


def _by_clock(
    held: tuple[tuple[int, int], ...], at_op: dict[int, float]
) -> tuple[tuple[float, int], ...]:
    """Convert live bytes from op positions to seconds.

    Each top-level op ends with the last line before the next one, its own regions'
    lines included.

    Args:
      held: (position of an op in the walk, bytes live after it).
      at_op: position in the walk → end of the op, in seconds.
    """
    ends = sorted(at_op.items())
    found: list[tuple[float, int]] = []
    time, at = 0.0, 0
    for i, (_, held_bytes) in enumerate(held):
        following = held[i + 1][0] if i + 1 < len(held) else ends[-1][0] + 1
        while at < len(ends) and ends[at][0] < following:
            time = ends[at][1]
            at += 1
        found.append((time, held_bytes))
    return tuple(found)


def _held(plan: PlanData, program: Program) -> tuple[tuple[int, int], ...]:
    """Return (op position in the walk, live bytes), scaled to the predicted peak."""
    sizes = tuple(size for _, size in plan.mesh_axes)
    specs = plan.decisions.values

    def local_bytes(value: int) -> float:
        v = program.values[value]
        spec = specs.get(value)
        if spec is None or len(spec) != v.rank:
            return float(v.bytes)
        return v.bytes * share_of(spec, v.shape, sizes)

    last: dict[int, int] = {}
    order = [program.ops[i] for i in program.body.ops]
    for at, op in enumerate(order):
        for value in op.operands:
            last[value] = at
    for out in program.outputs:
        last[out.value] = len(order)
    held = {i.value: local_bytes(i.value) for i in program.inputs}
    donated = {i.value for i in program.inputs if i.is_donated}
    ranks = {op.id: rank for rank, (op, _) in enumerate(program.walk())}
    now, points = sum(held.values()), []
    for at, op in enumerate(order):
        made = {
            v: local_bytes(v)
            for v in op.results
            if (v in last and not op.is_fusible) or last.get(v) == len(order)
        }
        held.update(made)
        now += sum(made.values())
        points.append((ranks[op.id], now))
        for value in set(op.operands):
            is_over = last.get(value) == at
            kept = value in {i.value for i in program.inputs} - donated
            if is_over and not kept and value in held:
                now -= held.pop(value)
    most = max((b for _, b in points), default=0.0)
    scale = plan.predicted.peak_bytes / most if most else 0.0
    return tuple((op, round(b * scale)) for op, b in points)


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
