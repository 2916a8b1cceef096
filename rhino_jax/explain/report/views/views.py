"""All drawings of a plan, as sections of its report.

`memory` draws the live bytes over the step; `timeline` its compute, and collectives by
the mesh axes that they run over; `network` the device mesh, and the bytes that each
device sends over every axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rhino_jax.explain.report.section import Section
from rhino_jax.explain.report.step import (
    DeviceStep,
    LineCompute,
    StepCollective,
    step_of,
)
from rhino_jax.explain.report.tables import format_axes
from rhino_jax.explain.report.views.boxes import HUES, box, colour, legend, row
from rhino_jax.explain.report.views.treemap import regions, treemap
from rhino_jax.ir.collectives import KINDS
from rhino_jax.units import format_bytes, format_flops, format_seconds, format_share


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData


HEIGHT = 120
WIDTH = 1000


def memory(step: DeviceStep, budget_bytes: int) -> str:
    """Draw live bytes over the step; empty if they are not known."""
    if not step.memory or not step.seconds:
        return ""
    peak_s, peak = max(step.memory, key=lambda point: point[1])
    points, last = [f"0,{HEIGHT}"], step.memory[0][1]
    for time_s, held in _few(step):
        x = time_s / step.seconds * WIDTH
        points += [f"{x:.1f},{_y(last, peak)}", f"{x:.1f},{_y(held, peak)}"]
        last = held
    points += [f"{WIDTH},{_y(last, peak)}", f"{WIDTH},{HEIGHT}"]
    at = peak_s / step.seconds
    words = (
        f"{format_bytes(peak)} at the peak, {format_share(at)} into the step;"
        f" budget {format_bytes(budget_bytes)}"
    )
    return (
        f'<div class="memory" style="text-align:left"><div>{words}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img"'
        f' style="width:100%;height:8em;display:block"><title>{words}</title>'
        f'<polygon points="{" ".join(points)}" fill="{colour(HUES[0], 0.35)}"/>'
        f'<line x1="{at * WIDTH:.1f}" x2="{at * WIDTH:.1f}" y1="0" y2="{HEIGHT}"'
        ' stroke="currentColor" stroke-dasharray="4 3" opacity=".6"'
        ' vector-effect="non-scaling-stroke"/></svg></div>'
    )


def _y(held: int, peak: int) -> str:
    return f"{HEIGHT * (1 - held / peak) if peak else HEIGHT:.1f}"


def _few(step: DeviceStep) -> list[tuple[float, int]]:
    """Return the largest point of each pixel, as more points cannot be seen."""
    found: dict[int, tuple[float, int]] = {}
    for point in step.memory:
        pixel = int(point[0] / step.seconds * WIDTH / 2)
        if pixel not in found or found[pixel][1] < point[1]:
            found[pixel] = point
    return list(found.values())


MAX_BOXES = 300
"""Maximum number of boxes in one track: as many as a narrow page can show apart."""


def hue_of(kind: str) -> int:
    """Return the hue of a kind of collective, in degrees."""
    return HUES[1 + min(list(KINDS).index(kind), 4)]


def timeline(step: DeviceStep) -> str:
    """Draw a track of compute, and one of collectives for each set of axes."""
    if not step.seconds:
        return ""
    to_percent = 100 / step.seconds
    lines = [
        row("compute", [_work(w, to_percent) for w in _few_spans(step.work, step)])
    ]
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


def _few_spans(work: Sequence[LineCompute], step: DeviceStep) -> Iterable[LineCompute]:
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


MAX_DEVICES = 16
"""Maximum number of devices drawn along an axis."""

CELL = 26


def network(plan: PlanData) -> str:
    """Draw devices as a grid with links as thick as their traffic."""
    names = [name for name, _ in plan.mesh_axes]
    sent = dict.fromkeys(names, 0.0)
    seconds = dict.fromkeys(names, 0.0)
    for c in plan.collectives:
        for name in c.axes:
            # A collective over several axes is split evenly among them.
            sent[name] = sent.get(name, 0.0) + c.bytes / len(c.axes)
            seconds[name] = seconds.get(name, 0.0) + c.seconds / len(c.axes)
    most = max(sent.values(), default=0.0)
    lines = []
    for i, (name, size) in enumerate(plan.mesh_axes):
        said = f"{format_bytes(sent[name])}, {format_seconds(seconds[name])}"
        width = 100 * sent[name] / most if most else 0.0
        label = said if width > _LABELLED else ""
        bar = box(0, width, colour(HUES[i % len(HUES)], 0.4), title=said, label=label)
        text = (
            ""
            if label
            else f'<span style="margin-left:{width:.1f}%">&nbsp;{said}</span>'
        )
        lines.append(row(f"{name} = {size}", [bar, text]))
    note = "bytes that each device sends over an axis, in one step"
    return (
        f'<div class="network" style="text-align:left"><div>{note}</div>'
        f"{''.join(lines)}{_grid(plan, sent, most)}</div>"
    )


_LABELLED = 40.0
"""Percent of the width that a label needs."""


def _grid(plan: PlanData, sent: dict[str, float], most: float) -> str:
    """Draw the last two axes of a mesh; a note counts the others."""
    axes = plan.mesh_axes[-2:]
    if not axes:
        return ""
    across, down = axes[-1], axes[0] if len(axes) > 1 else ("", 1)
    columns, rows = min(across[1], MAX_DEVICES), min(down[1], MAX_DEVICES)

    def link(x: int, y: int, dx: int, dy: int, name: str, hue: int) -> str:
        width = 1 + 6 * (sent[name] / most if most else 0.0)
        x1, y1 = (x + 0.5) * CELL, (y + 0.5) * CELL
        return (
            f'<line x1="{x1}" y1="{y1}" x2="{x1 + dx * CELL}" y2="{y1 + dy * CELL}"'
            f' stroke="{colour(hue, 0.6)}" stroke-width="{width:.1f}"/>'
        )

    hues = {name: HUES[i % len(HUES)] for i, (name, _) in enumerate(plan.mesh_axes)}
    parts = []
    for y in range(rows):
        for x in range(columns):
            if x + 1 < columns:
                parts.append(link(x, y, 1, 0, across[0], hues[across[0]]))
            if y + 1 < rows:
                parts.append(link(x, y, 0, 1, down[0], hues[down[0]]))
    for y in range(rows):
        for x in range(columns):
            cx, cy = (x + 0.5) * CELL, (y + 0.5) * CELL
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="6" fill="currentColor"/>')
    w, h = columns * CELL, rows * CELL
    drawn = columns * rows
    whole = math.prod(size for _, size in plan.mesh_axes)
    note = f"<div>{drawn} of {whole} devices</div>" if drawn < whole else ""
    return (
        f'<svg width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img"'
        f' style="display:block;max-width:100%;height:auto">'
        f"<title>{rows} × {columns} devices</title>{''.join(parts)}</svg>{note}"
    )


def views_of(plan: PlanData) -> tuple[Section, ...]:
    """Return sections with the drawings of a plan, without those that have no data."""
    if plan.has_tasks:
        return (Section("memory of one device", drawing=treemap(plan)),)
    step = step_of(plan)
    found = (
        Section("one step, by the clock", drawing=timeline(step)),
        Section("memory over the step", drawing=memory(step, plan.memory_budget_bytes)),
        Section("memory of one device", drawing=treemap(plan)),
        Section("the mesh", drawing=network(plan) if plan.mesh_axes else ""),
        Section("the program, by line", drawing=regions(plan), is_open=False),
    )
    return tuple(s for s in found if s.drawing)
