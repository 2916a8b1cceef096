"""Scatter plot of two quantities, with the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from rhino_jax.explain.report.views.boxes import HUES, colour, legend


WIDE = 8.0
"""Ratio of the largest to the smallest value from which on an axis is logarithmic."""

EDGE = 4.0
"""Margin of the plot in percent, so that no point is clipped."""

HEIGHT_EM = 17


@dataclass(frozen=True, slots=True)
class Dot:
    """One point.

    Attributes:
      x, y: positive coordinates.
      kind: category, shown by its colour.
      title: tooltip.
      is_marked: whether it is highlighted.
    """

    x: float
    y: float
    kind: str
    title: str
    is_marked: bool


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """One axis of a plot.

    Attributes:
      name: name of the quantity.
      form: formats a value.
    """

    name: str
    form: Callable[[float], str]


def scatter(dots: Sequence[Dot], x: PlotAxis, y: PlotAxis, *, marks: str) -> str:
    """Draw the plot, with a legend; empty for fewer than two points.

    Args:
      dots: the points; those without positive coordinates are left out.
      x, y: horizontal and vertical axis: the less the better.
      marks: legend of highlighted points.
    """
    dots = [d for d in dots if 0 < d.x < math.inf and 0 < d.y < math.inf]
    if len(dots) < 2:
        return ""
    kinds = sorted({d.kind for d in dots})
    hues = {kind: 360 * i // len(kinds) for i, kind in enumerate(kinds)}
    if len(kinds) <= len(HUES):
        hues = dict(zip(kinds, HUES, strict=False))
    across, up = _Scale.of([d.x for d in dots]), _Scale.of([d.y for d in dots])
    # Highlighted points are drawn above the others.
    drawn = [
        _dot(d, hues[d.kind], across, up)
        for d in sorted(dots, key=lambda d: d.is_marked)
    ]
    keys = [(colour(hue, 0.8), kind) for kind, hue in hues.items()]
    ring = '<span class="key">with a ring: ' + escape(marks) + "</span>"
    return (
        '<div class="scatter" style="text-align:left">'
        f'<div class="quantity">{escape(y.name)}, over {escape(x.name)}</div>'
        '<div style="display:flex">'
        f'<div class="ticks" style="flex:0 0 6em;position:relative;'
        f'height:{HEIGHT_EM}em">{_ticks(up, y, _UP)}</div>'
        f'<div class="plot" style="flex:1 1 auto;position:relative;min-width:0;'
        f"height:{HEIGHT_EM}em;border-left:1px solid rgba(128,128,128,.5);"
        f'border-bottom:1px solid rgba(128,128,128,.5)">{_front(dots, across, up)}'
        f"{''.join(drawn)}</div></div>"
        f'<div class="ticks" style="margin-left:6em;position:relative;height:1.6em">'
        f"{_ticks(across, x, _ACROSS)}</div>{legend(keys)}{ring}</div>"
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """Linear or logarithmic scale from a value to percent of the plot.

    Attributes:
      low, high: range of the values.
      is_log: whether it is logarithmic.
    """

    low: float
    high: float
    is_log: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> _Scale:
        low, high = min(values), max(values)
        if high == low:
            return cls(low / 2, high * 2, False)
        return cls(low, high, high / low >= WIDE)

    def percent(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return EDGE + (100 - 2 * EDGE) * (at - low) / (high - low)

    def middle(self) -> float:
        if self.is_log:
            return math.sqrt(self.low * self.high)
        return (self.low + self.high) / 2


def _dot(d: Dot, hue: int, across: _Scale, up: _Scale) -> str:
    ring = "box-shadow:0 0 0 2px currentColor;" if d.is_marked else ""
    strength = 1.0 if d.is_marked else 0.6
    return (
        f'<div class="dot{" marked" if d.is_marked else ""}" title="{escape(d.title)}"'
        f' style="position:absolute;left:{across.percent(d.x):.2f}%;'
        f"bottom:{up.percent(d.y):.2f}%;width:8px;height:8px;margin:0 0 -4px -4px;"
        f'border-radius:50%;{ring}background:{colour(hue, strength)}"></div>'
    )


def _front(dots: Sequence[Dot], across: _Scale, up: _Scale) -> str:
    """Draw the Pareto front as a step line."""
    best, points = math.inf, list[tuple[float, float]]()
    for d in sorted(dots, key=lambda d: (d.x, d.y)):
        if d.y < best:
            at = across.percent(d.x)
            if points:
                points.append((at, points[-1][1]))
            points.append((at, 100 - up.percent(d.y)))
            best = d.y
    text = " ".join(f"{a:.2f},{b:.2f}" for a, b in points)
    return (
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true"'
        ' style="position:absolute;width:100%;height:100%;left:0;top:0">'
        f'<polyline points="{text}" fill="none" stroke="currentColor" opacity=".5"'
        ' vector-effect="non-scaling-stroke"/></svg>'
    )


def _ticks(scale: _Scale, axis: PlotAxis, places: Sequence[str]) -> str:
    """Return the labels of an axis: of its lowest, middle and highest value.

    Args:
      scale: the axis.
      axis: its name and format.
      places: CSS that places each of them at a percentage.
    """
    values = scale.low, scale.middle(), scale.high
    return "".join(
        f'<div class="tick" style="position:absolute;'
        f"{place.format(scale.percent(value))};white-space:nowrap;"
        f'line-height:1.6em">{escape(axis.form(value))}</div>'
        for value, place in zip(values, places, strict=True)
    )


_UP = ("right:.5em;bottom:calc({:.2f}% - .8em)",) * 3

_ACROSS = tuple(
    f"left:{{:.2f}}%;transform:translateX(-{shift}%)" for shift in (25, 50, 75)
)
"""Shifted left by a part of the label's own width, so that the outer ones stay next to
the plot."""
