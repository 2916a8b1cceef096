"""The step as a timeline: compute, and collectives by the mesh axes they run over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rhino_jax.explain.report.collectives import format_axes
from rhino_jax.explain.report.step import DeviceStep, LineCompute, StepCollective
from rhino_jax.explain.report.views.boxes import HUES, box, colour, legend, row
from rhino_jax.units import format_bytes, format_flops, format_seconds


MAX_BOXES = 300
"""Maximum number of boxes in one track: as many as a narrow page can show apart."""

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def hue_of(kind: str) -> int:
    """Return the hue of a kind of collective, in degrees."""
    return HUES[1 + KINDS.index(kind)] if kind in KINDS else HUES[5]


def timeline(step: DeviceStep) -> str:
    """Draw a track of compute, and one of collectives for each set of axes."""
    if not step.seconds:
        return ""
    to_percent = 100 / step.seconds
    lines = [row("compute", [_work(w, to_percent) for w in _few(step.work, step)])]
    for axes in sorted({s.collective.axes for s in step.sent}):
        sent = [s for s in step.sent if s.collective.axes == axes]
        boxes = [b for s in sent for b in _sent(s, to_percent)]
        lines.append(row(f"over {format_axes(axes)}", boxes))
    ticks = [f"{i * 25} %" for i in range(4)]
    marks = [
        box(i * 25, 25, "transparent", title=t, label=t) for i, t in enumerate(ticks)
    ]
    lines.append(row(f"of {format_seconds(step.seconds)}", marks, 1.4))
    kinds = sorted({s.collective.kind for s in step.sent})
    keys = [
        (colour(HUES[0], 0.55), "compute, forward and update"),
        (colour(HUES[0], 0.3), "backward"),
        *((colour(hue_of(k), 0.7), k) for k in kinds),
    ]
    if step.sent:
        keys.append((colour(None, 0.5), "the pale part of a collective is hidden"))
    return f'<div class="timeline">{"".join(lines)}{legend(keys)}</div>'


def _few(work: Sequence[LineCompute], step: DeviceStep) -> Iterable[LineCompute]:
    """Yield compute with adjacent entries merged if too narrow to be seen."""
    least_s = step.seconds / MAX_BOXES
    held: LineCompute | None = None
    for w in work:
        if held is not None and w.is_backward == held.is_backward:
            is_narrow = held.end_s - held.start_s < least_s
            if w.start_s - held.end_s < least_s / 4 and is_narrow:
                held = replace(
                    held,
                    end_s=w.end_s,
                    ops=held.ops + w.ops,
                    flops=held.flops + w.flops,
                    name=held.name if w.flops <= held.flops else w.name,
                )
                continue
        if held is not None:
            yield held
        held = w
    if held is not None:
        yield held


def _work(w: LineCompute, to_percent: float) -> str:
    seconds = w.end_s - w.start_s
    title = (
        f"{w.name}: {format_seconds(seconds)}, {format_flops(w.flops)}, {w.ops} ops"
        f"{', backward' if w.is_backward else ''}"
    )
    background = colour(HUES[0], 0.3 if w.is_backward else 0.55)
    left, width = w.start_s * to_percent, seconds * to_percent
    return box(left, width, background, title=title, label=w.name)


def _sent(s: StepCollective, to_percent: float) -> Iterable[str]:
    c = s.collective
    title = (
        f"{c.kind} over {format_axes(c.axes)}, {c.count}x: {format_bytes(c.bytes)},"
        f" {format_seconds(c.seconds)}, hidden {format_seconds(s.hidden_s)}"
        f"; {c.source}; {c.reason}"
    )
    left, hue = s.start_s * to_percent, hue_of(c.kind)
    hidden, whole = s.hidden_s * to_percent, (s.end_s - s.start_s) * to_percent
    if s.hidden_s:
        yield box(left, hidden, colour(hue, 0.25), title=title)
    yield box(
        left + hidden, whole - hidden, colour(hue, 0.7), title=title, label=c.kind
    )
