"""All drawings of a plan, as sections of its report.

`memory` draws the live bytes over the step; `timeline` its compute, and collectives by
the mesh axes that they run over; `network` the device mesh, and the bytes that each
device sends over every axis; `shardings` the largest arrays as grids of their shards,
with the devices that hold each, as `jax.debug.visualize_array_sharding` draws them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from rhino_jax.explain.report.section import Section
from rhino_jax.explain.report.step import DeviceStep, StepSpan, step_of
from rhino_jax.explain.report.tables import Fold, fold, format_array, format_axes
from rhino_jax.explain.report.views.boxes import HUES, Markup, box, colour, legend, row
from rhino_jax.explain.report.views.treemap import regions, treemap
from rhino_jax.ir.collectives import KINDS
from rhino_jax.ir.spec import Spec, axes_of, format_spec, shards_per_dim
from rhino_jax.units import format_bytes, format_flops, format_seconds, format_share


if TYPE_CHECKING:
    from rhino_jax.plan.plan import Leaf, PlanData
    from rhino_jax.plan.records import Collective, LineSpan, LoopSpan


HEIGHT = 120
WIDTH = 1000
HEIGHT_EM = 8.0

MIN_OF_BUDGET = 0.1
"""Smallest peak, as a share of the budget, that is drawn to the scale of the budget:
smaller curves could not be read."""


def memory(step: DeviceStep, budget_bytes: int) -> str:
    """Draw live bytes over the step, with an axis and the budget."""
    if not step.memory or not step.seconds:
        return ""
    peak_s, peak = max(step.memory, key=lambda point: point[1])
    is_to_scale = peak >= MIN_OF_BUDGET * budget_bytes
    top = 1.08 * max(peak, budget_bytes if is_to_scale else 1)
    points, last = [f"0,{HEIGHT}"], step.memory[0][1]
    for time_s, held in _few(step):
        x = time_s / step.seconds * WIDTH
        points += [f"{x:.1f},{_y(last, top)}", f"{x:.1f},{_y(held, top)}"]
        last = held
    points += [f"{WIDTH},{_y(last, top)}", f"{WIDTH},{HEIGHT}"]
    at = peak_s / step.seconds
    budget = f"budget {format_bytes(budget_bytes)}"
    words = f"{format_bytes(peak)} at the peak, {format_share(at)} into the step"
    words += f"; {budget}" if is_to_scale else f"; the {budget} is beyond the axis"
    marks = [(peak, f"peak {format_bytes(peak)}")]
    if is_to_scale:
        marks.append((budget_bytes, budget))
    lines = "".join(
        f'<line x1="0" x2="{WIDTH}" y1="{_y(held, top)}" y2="{_y(held, top)}"'
        ' stroke="currentColor" stroke-dasharray="4 3" opacity=".6"'
        ' vector-effect="non-scaling-stroke"/>'
        for held, _ in marks
    )
    drawn = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img"'
        ' style="width:100%;height:100%;display:block;border-left:1px solid;'
        f'border-bottom:1px solid"><title>{words}</title>'
        f'<polygon points="{" ".join(points)}" fill="{colour(HUES[0], 0.35)}"/>'
        f"{lines}</svg>"
    )
    return (
        f'<div class="memory" style="text-align:left"><div>{words}</div>'
        f"{row(_axis(marks, top), [drawn], HEIGHT_EM)}"
        f"{_clock(step)}</div>"
    )


def _axis(marks: Sequence[tuple[int, str]], top: float) -> Markup:
    """Return the labels of a vertical axis from 0 to `top`, without those that would
    overlap."""
    found, used = [], [0.0]
    for amount, words in (*marks, (0, "0"), (int(top / 2.16), "")):
        up = amount / top * 100
        is_apart = all(abs(up - x) > 100 * 1.5 / HEIGHT_EM for x in used)
        if amount and not is_apart:
            continue
        used.append(up)
        found.append(
            f'<div style="position:absolute;right:.4em;bottom:{up:.1f}%;'
            f'transform:translateY(50%)">{escape(words or format_bytes(amount))}</div>'
        )
    return Markup(
        '<div class="axis" style="position:relative;height:100%;white-space:nowrap">'
        f"{''.join(found)}</div>"
    )


def _y(held: float, top: float) -> str:
    return f"{HEIGHT * (1 - held / top):.1f}"


def _clock(step: DeviceStep) -> str:
    """Return a track with a mark at every quarter of the step."""
    ticks = [f"{i * 25} %" for i in range(4)]
    marks = [
        box(i * 25, 25, "transparent", title=t, label=t) for i, t in enumerate(ticks)
    ]
    return row(f"of {format_seconds(step.seconds)}", marks, 1.4)


def _few(step: DeviceStep) -> list[tuple[float, int]]:
    """Return the largest and the last point of each pixel: more cannot be seen."""
    found: dict[int, list[tuple[float, int]]] = {}
    for point in step.memory:
        pixel = int(point[0] / step.seconds * WIDTH / 2)
        seen = [*found.get(pixel, ()), point]
        found[pixel] = [max(seen, key=lambda at: at[1]), point]
    return [point for points in found.values() for point in points]


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
    for axes in sorted({s.of.axes for s in step.sent}):
        sent = [s for s in step.sent if s.of.axes == axes]
        boxes = [b for s in sent for b in _sent(s, to_percent)]
        lines.append(row(f"over {format_axes(axes)}", boxes))
    if step.loops:
        nested = [*_tracks(step.loops)]
        lines += [row("loops", [_loop(x, to_percent) for x in one]) for one in nested]
    lines.append(_clock(step))
    kinds = sorted({s.of.kind for s in step.sent})
    keys = [
        (colour(HUES[0], 0.55), "compute, forward and update"),
        (colour(HUES[0], 0.3), "backward"),
        *((colour(hue_of(k), 0.7), k) for k in kinds),
    ]
    if step.sent:
        keys.append((colour(None, 0.5), "the pale part of a collective is hidden"))
    return f'<div class="timeline">{"".join(lines)}{legend(keys)}</div>'


def _tracks(loops: Sequence[StepSpan[LoopSpan]]) -> Iterator[list[StepSpan[LoopSpan]]]:
    """Yield loops that do not overlap: the outer ones, then those inside, two levels at
    most."""
    rest = list(loops)
    for _ in range(2):
        ends = [
            x
            for x in rest
            if not any(
                y is not x
                and y.of.first_op <= x.of.first_op
                and x.of.last_op <= y.of.last_op
                for y in rest
            )
        ]
        if ends:
            yield ends
        rest = [x for x in rest if x not in ends]


def _loop(x: StepSpan[LoopSpan], to_percent: float) -> str:
    """Draw a loop, with marks between its trips where these can be seen apart."""
    count, line = x.of.trip_count, x.of.source.partition(" (")[0]
    left, width = x.start_s * to_percent, (x.end_s - x.start_s) * to_percent
    trips = f"{count:,} trips"
    title = (
        f"{trips} of the loop at {x.of.source}: {format_seconds(x.end_s - x.start_s)}"
    )
    background = colour(None, 0.35)
    if count <= width * MAX_BOXES / 100:
        each = f"calc(100%/{count})"
        background = (
            f"repeating-linear-gradient(to right,{colour(None, 0.35)} 0,"
            f"{colour(None, 0.35)} calc({each} - 1px),{colour(None, 1.2)}"
            f" calc({each} - 1px),{colour(None, 1.2)} {each})"
        )
    return box(left, width, background, title=title, label=f"{trips} ({line})")


def _few_spans(
    work: Sequence[StepSpan[LineSpan]], step: DeviceStep
) -> Iterable[StepSpan[LineSpan]]:
    """Yield compute with adjacent entries merged if too narrow to be seen."""
    least_s = step.seconds / MAX_BOXES
    held: StepSpan[LineSpan] | None = None
    for w in work:
        if held is not None and w.of.is_backward == held.of.is_backward:
            is_narrow = held.end_s - held.start_s < least_s
            if w.start_s - held.end_s < least_s / 4 and is_narrow:
                a, b = held.of, w.of
                span = replace(
                    a,
                    last_op=b.last_op,
                    flops=a.flops + b.flops,
                    source=a.source if b.flops <= a.flops else b.source,
                )
                held = StepSpan(span, held.start_s, w.end_s)
                continue
        if held is not None:
            yield held
        held = w
    if held is not None:
        yield held


def _work(w: StepSpan[LineSpan], to_percent: float) -> str:
    seconds, span = w.end_s - w.start_s, w.of
    title = (
        f"{span.source}: {format_seconds(seconds)}, {format_flops(span.flops)}"
        f"{', backward' if span.is_backward else ''}"
    )
    background = colour(HUES[0], 0.3 if span.is_backward else 0.55)
    left, width = w.start_s * to_percent, seconds * to_percent
    return box(left, width, background, title=title, label=span.source)


def _sent(s: StepSpan[Collective], to_percent: float) -> Iterable[str]:
    c = s.of
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
    step, budget_bytes = step_of(plan), plan.memory_budget_bytes
    found = (
        Section("one step, by the clock", drawing=timeline(step) if step else ""),
        Section(
            "memory over the step", drawing=memory(step, budget_bytes) if step else ""
        ),
        Section("memory of one device", drawing=treemap(plan)),
        Section("shards of the largest arrays", drawing=shardings(plan)),
        Section("the mesh", drawing=network(plan) if plan.mesh_axes else ""),
        Section("the program, by line", drawing=regions(plan), is_open=False),
    )
    return tuple(s for s in found if s.drawing)


MAX_ARRAYS = 6
"""Maximum number of arrays drawn, each of another sharding."""

MAX_CELLS = 16
"""Maximum number of shards drawn along a side."""

MAX_NAMED = 4
"""Maximum number of devices named in a shard, of more the first and the last; and of
columns in which more than the first is."""

Cell = tuple[int, int]


def shardings(plan: PlanData) -> str:
    """Draw the largest arguments of different shardings; empty without a mesh."""
    names, sizes = zip(*plan.mesh_axes, strict=True) if plan.mesh_axes else ((), ())
    if math.prod(sizes) == 1:
        return ""
    folds = fold((x.path, (x.shape, x.dtype, x.spec)) for x in plan.inputs)

    def held_bytes(item: Fold) -> int:
        return sum(plan.inputs[i].bytes_per_device for i in item.members)

    largest = sorted(folds, key=lambda item: -held_bytes(item))
    drawn: dict[Spec, str] = {}
    for found in largest:
        leaf = plan.inputs[found.members[0]]
        kind = leaf.spec if axes_of(leaf.spec) else ()
        if leaf.shape and kind not in drawn and len(drawn) < MAX_ARRAYS:
            drawn[kind] = _figure(found.label, leaf, names, sizes)
    return (
        '<div class="shardings" style="text-align:left"><div>dims from top to bottom'
        " and from left to right, with the devices that hold each shard, by their place"
        f" in the mesh</div>{''.join(drawn.values())}</div>"
    )


def _figure(label: str, leaf: Leaf, names: Sequence[str], sizes: Sequence[int]) -> str:
    counts = shards_per_dim(leaf.spec, tuple(sizes))
    split = [d for d, n in enumerate(counts) if n > 1]
    down, across = _drawn_dims(split, len(leaf.shape))
    rows = 1 if down is None else counts[down]
    columns = 1 if across is None else counts[across]
    cells = _devices(leaf.spec, (down, across), sizes)
    boxes = [
        _cell(cells[i, j], HUES[(i * columns + j) % len(HUES)], columns)
        for i in range(min(rows, MAX_CELLS))
        for j in range(min(columns, MAX_CELLS))
    ]
    sides = [f"dim {d}: {leaf.shape[d]}" for d in (down, across) if d is not None]
    notes = [" × ".join(sides)] if sides else ["every device has all of it"]
    if max(rows, columns) > MAX_CELLS:
        notes.append(f"the first of {rows} × {columns} shards")
    notes += [f"dim {d} in {counts[d]}, too" for d in split if d not in (down, across)]
    text = f"{format_array(leaf.shape, leaf.dtype)} {format_spec(leaf.spec, names)}"
    return (
        '<div class="sharding" style="display:inline-block;vertical-align:top;'
        'width:19em;max-width:100%;margin:.3em 1em .5em 0;overflow-wrap:anywhere">'
        f"<code>{escape(label)}</code><br><code>{escape(text)}</code>"
        '<div style="display:grid;font-size:10px;grid-template-columns:'
        f"repeat({min(columns, MAX_CELLS)},minmax(0,1fr));"
        f"grid-template-rows:repeat({min(rows, MAX_CELLS)},minmax(0,1fr));"
        f'height:{max(8.0, 1.25 * min(rows, MAX_CELLS)):.2f}em">'
        f"{''.join(boxes)}</div>{escape('; '.join(notes))}</div>"
    )


def _drawn_dims(split: Sequence[int], rank: int) -> tuple[int | None, int | None]:
    """Return the dims that are drawn from top to bottom and from left to right: the
    first two that are sharded."""
    if len(split) > 1:
        return split[0], split[1]
    if not split:
        return None, None
    is_last = split[0] == rank - 1
    return (None, split[0]) if is_last else (split[0], None)


def _devices(
    spec: Spec, dims: tuple[int | None, int | None], sizes: Sequence[int]
) -> Mapping[Cell, list[int]]:
    """Return the row and column of a shard → the devices that hold it, in order."""
    found: dict[Cell, list[int]] = defaultdict(list)
    for device in range(math.prod(sizes)):
        at, rest = [0] * len(sizes), device
        for axis in reversed(range(len(sizes))):
            rest, at[axis] = divmod(rest, sizes[axis])
        cell = [0, 0]
        for side, dim in enumerate(dims):
            for axis in () if dim is None else spec[dim]:
                cell[side] = cell[side] * sizes[axis] + at[axis]
        found[cell[0], cell[1]].append(device)
    return found


def _cell(devices: Sequence[int], hue: int, columns: int) -> str:
    words = " ".join(map(str, devices))
    shown = words
    if columns > MAX_NAMED:  # the number of the first, as far as it fits
        shown = f"{devices[0]}" if max(devices) < 100 or columns <= 8 else ""
    elif len(devices) > MAX_NAMED:
        shown = f"{devices[0]} … {devices[-1]}"
    return (
        f'<div class="box" title="devices {words}" style="background:'
        f"{colour(hue, 0.35)};overflow:hidden;text-align:center;font-size:10px;"
        f'line-height:1.2em;text-indent:0">{shown}</div>'
    )
