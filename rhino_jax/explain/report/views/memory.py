"""Memory over the step."""

from __future__ import annotations

from rhino_jax.explain.report.step import DeviceStep
from rhino_jax.explain.report.views.boxes import HUES, colour
from rhino_jax.units import format_bytes, format_share


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
