"""Quantities of several sides as bars, one below the other.

Sides are predicted and compiled, baseline and planned, or plan A and plan B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rhino_jax.explain.report.tables import format_axes
from rhino_jax.explain.report.views.boxes import HUES, beside, box, colour, legend, row
from rhino_jax.plan.records import traffic_by
from rhino_jax.units import format_bytes, format_ratio, format_seconds


if TYPE_CHECKING:
    from rhino_jax.plan.records import Collective, Predicted

LONGEST = 66.0
"""Percent of the width that the longest bar takes; its label takes the rest."""

LINE_EM = 1.7
"""Height of a bar, in em."""

STRENGTHS = (0.6, 0.3, 0.15, 0.45, 0.22)
"""Opacities of the parts of a bar, from the left, so that neighbours differ visibly."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One side of a quantity.

    Attributes:
      parts: (amount, label) from the left.
      words: label next to the bar.
    """

    parts: tuple[tuple[float, str], ...]
    words: str

    @property
    def whole(self) -> float:
        return sum(amount for amount, _ in self.parts)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity to compare.

    Attributes:
      name: for example "peak memory".
      unit: quantities of one unit are drawn to one scale.
      bars: one for each side; None if a side does not have it.
      first: index of the side that the first bar belongs to.
    """

    name: str
    unit: str
    bars: tuple[Bar | None, ...]
    first: int = 0


def amount(
    name: str, values: Sequence[float | None], form: Callable[[float], str]
) -> Quantity:
    """Return a quantity of one number per side, each with its ratio to the first.

    Args:
      name: name of the quantity.
      values: one number per side; None if a side has none.
      form: formats a number.
    """
    first = values[0]
    found: list[Bar | None] = []
    for i, value in enumerate(values):
        if value is None:
            found.append(None)
            continue
        words = form(value)
        if i and first and value and value != first:
            words += f" ({format_ratio(value / first)})"
        found.append(Bar(((value, name),), words))
    return Quantity(name, name, tuple(found))


def step_of(sides: Sequence[Predicted | None]) -> Quantity:
    """Return the step time of each side, as compute and exposed communication."""
    whole = amount(
        "step time",
        [None if side is None else side.step_time_s for side in sides],
        format_seconds,
    )
    found: list[Bar | None] = []
    for bar, side in zip(whole.bars, sides, strict=True):
        if bar is None or side is None:
            found.append(None)
            continue
        compute_s = min(side.compute_s, side.step_time_s)
        rest_s = side.step_time_s - compute_s
        parts = ((compute_s, "compute"), (rest_s, "communication, not hidden"))
        found.append(Bar(parts, bar.words))
    return Quantity("step time", "step", tuple(found))


EXPOSED = "pale: communication that compute does not hide"


def peak_of(sides: Sequence[Predicted | None]) -> Quantity:
    """Return the peak memory of each side."""
    peaks = [None if side is None else side.peak_bytes for side in sides]
    return amount("peak memory", peaks, format_bytes)


def wire_of(sides: Sequence[Iterable[Collective]]) -> list[Quantity]:
    """Return the bytes that a device sends over each set of axes, the most first."""
    sent = [
        {axes: t.bytes for axes, t in traffic_by(lambda c: c.axes, side).items()}
        for side in sides
    ]
    every = {axes: max(s.get(axes, 0) for s in sent) for s in sent for axes in s}
    found = []
    for axes in sorted(every, key=lambda a: (-every[a], a)):
        over = amount(
            f"sent over {format_axes(axes)}",
            [s.get(axes, 0) for s in sent],
            format_bytes,
        )
        found.append(Quantity(over.name, "sent", over.bars))
    return found


def bars(
    quantities: Sequence[Quantity],
    sides: Sequence[str],
    *,
    parts: Sequence[str] = ("", EXPOSED),
) -> str:
    """Draw a track for each quantity, with a bar for each side; empty without any.

    Args:
      quantities: the quantities to compare.
      sides: names of the sides.
      parts: names of the parts of bars, from the left and the most opaque; empty for
        parts without a legend entry.
    """
    most: dict[str, float] = {}
    for q in quantities:
        longest = max((b.whole for b in q.bars if b is not None), default=0.0)
        most[q.unit] = max(most.get(q.unit, 0.0), longest)
    tracks = [
        row(q.name, _track(q, sides, most[q.unit]), LINE_EM * len(q.bars))
        for q in quantities
        if most[q.unit]
    ]
    if not tracks:
        return ""
    keys = [(colour(HUES[i], STRENGTHS[0]), side) for i, side in enumerate(sides)]
    drawn = max(len(b.parts) for q in quantities for b in q.bars if b is not None)
    for i in range(drawn):
        if i < len(parts) and parts[i]:
            keys.append((colour(None, 2 * STRENGTHS[i]), parts[i]))
    return f'<div class="compared">{"".join(tracks)}{legend(keys)}</div>'


def _track(quantity: Quantity, sides: Sequence[str], most: float) -> list[str]:
    found, count = [], len(quantity.bars)
    for i, bar in enumerate(quantity.bars):
        at = quantity.first + i
        side, top, height, left = sides[at], i * 100 / count, 92 / count, 0.0
        for j, (value, what) in enumerate(() if bar is None else bar.parts):
            width = value / most * LONGEST
            if width > 0:
                title = f"{side}, {what}"
                background = colour(HUES[at], STRENGTHS[j])
                found.append(
                    box(left, width, background, title=title, top=top, height=height)
                )
            left += width
        words = "-" if bar is None else bar.words
        found.append(beside(left, words, top=top, height=height))
    return found
