"""Why a value is laid out as it is: the answer as data, shown as text and HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.report.html import sections_to_html
from rhino_jax.report.section import Section, Table
from rhino_jax.report.text import sections_to_text
from rhino_jax.units import format_bytes, format_seconds, format_share


@dataclass(frozen=True, slots=True)
class Added:
    """Collectives that one layout has, and the plan has not, or more of.

    Attributes:
      kind, axes: as of `plan.collectives`.
      seconds: more per step, hidden or not; negative where there is less.
      source: the user's line.
      reason: in words.
    """

    kind: str
    axes: tuple[str, ...]
    seconds: float
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A value held in one layout, everything else solved again.

    Attributes:
      spec: as text; `partition_spec`: as a pin takes it.
      is_planned: it is the plan's own.
      fits: whether anything fits so; else times are infinite.
      step_s: predicted seconds of the step, and `bound_s`, what it is proved not to be
        below.
      compute_s, communication_s: parts of it; what hides is in neither.
      by_axes: (mesh axes, seconds of all their collectives, hidden or not).
      peak_bytes: of one device; the least that was found where nothing fits.
      is_brief: it was searched briefly, as layouts that are far from the best are: the
        step is that of a plan that there is, and may be less.
      added: what makes the difference to the plan, the most seconds first.
      cannot: why it cannot be, where it is no layout of this value at all.
    """

    spec: str
    partition_spec: Any
    is_planned: bool
    fits: bool
    step_s: float
    bound_s: float
    compute_s: float
    communication_s: float
    by_axes: tuple[tuple[tuple[str, ...], float], ...]
    peak_bytes: int
    is_brief: bool = False
    added: tuple[Added, ...] = ()
    cannot: str = ""


@dataclass(frozen=True, slots=True)
class Why:
    """Why a value is laid out as it is; `print` it to read it.

    Attributes:
      key: as it was asked for; `name`: what people call it.
      type: element type and shape, as `bf16[64,192]`.
      source: the user's line, of values inside of the program.
      spec: the plan's layout, as text.
      answer: in sentences.
      layouts: the plan's, and the others, the fastest first.
      forces: who has a hand in it: pins, divisibility, memory, neighbours, recipes.
      planned_s: the step of the plan, all layouts free.
      seconds: that it took to find out.
    """

    key: str
    name: str
    type: str
    source: str
    spec: str
    answer: tuple[str, ...]
    layouts: tuple[Layout, ...]
    forces: tuple[str, ...]
    planned_s: float
    seconds: float

    def table(self, *, full: bool = False) -> str:
        """The whole answer as text, at most 100 columns wide.

        Args:
          full: show every layout, not only the best of them.
        """
        return sections_to_text(_tell(self, full=full))

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"Why({self.name}: {self.spec}; {len(self.layouts)} layouts)"

    def _repr_html_(self) -> str:
        return sections_to_html(_tell(self))


MOST_ROWS = 12
"""Layouts in a table that is not full."""


def _tell(why: Why, *, full: bool = False) -> tuple[Section, ...]:
    facts = [("layout", why.spec), ("array", why.type)]
    if why.source:
        facts.append(("made at", why.source))
    title = f"why {why.name} is {why.spec}"
    solved = [x for x in why.layouts if not x.cannot]
    shown = solved if full else solved[:MOST_ROWS]
    axes = list(dict.fromkeys(a for x in shown for a, _ in x.by_axes))
    rows = tuple(_row(layout, axes, why.planned_s) for layout in shown)
    header = ("layout", "step", "more", "compute", *map("+".join, axes), "peak")
    table = Table(header, rows, "<" + ">" * (len(header) - 1), (0,))
    took = (
        f"each held, everything else solved again: {format_seconds(why.seconds)} in"
        " all. Under mesh axes: their collectives, hidden or not."
    )
    if any(x.is_brief for x in why.layouts):
        took += " ≤: searched briefly."
    left = len(solved) - len(shown)
    if left:
        took += f" And {left} more layouts, all slower: table(full=True)."
    return (
        Section(title, facts=tuple(facts), lines=why.answer),
        Section("layouts", table=table, lines=(took,)),
        *([Section("who has a hand in it", lines=why.forces)] if why.forces else []),
    )


def _row(
    layout: Layout, axes: Sequence[tuple[str, ...]], planned_s: float
) -> tuple[str, ...]:
    mark = " (the plan)" if layout.is_planned else ""
    nothing = ("",) * len(axes)
    peak = format_bytes(layout.peak_bytes)
    if not layout.fits:
        return (layout.spec + mark, "does not fit", "", "", *nothing, peak)
    seconds = dict(layout.by_axes)
    return (
        layout.spec + mark,
        ("≤ " if layout.is_brief else "") + format_seconds(layout.step_s),
        more(layout.step_s - planned_s, planned_s),
        format_seconds(layout.compute_s),
        *(format_seconds(seconds.get(a, 0.0)) for a in axes),
        peak,
    )


def more(delta_s: float, of_s: float) -> str:
    """A difference of steps, as `+1.2 ms (4 %)`."""
    if not math.isfinite(delta_s):
        return "does not fit"
    if abs(delta_s) < 1e-4 * of_s:  # what is shown of the step has three digits
        return "="
    sign = "+" if delta_s > 0 else "−"
    share = format_share(abs(delta_s) / of_s)
    return f"{sign}{format_seconds(abs(delta_s))} ({share})"
