"""The device mesh, and the bytes that each device sends over every axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rhino_jax.explain.report.views.boxes import HUES, box, colour, row
from rhino_jax.units import format_bytes, format_seconds


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData

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
