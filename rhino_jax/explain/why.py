"""The explanation of a value's layout as data, shown as text and HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.explain.report.html import Displayed
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.units import format_bytes, format_seconds, format_share


@dataclass(frozen=True, slots=True)
class Added:
    """Collectives that a layout has more or less of than the plan.

    Attributes:
      kind, axes: as in `plan.collectives`.
      seconds: change per step, hidden or not; negative if there is less.
      source: the user's source line.
      reason: why the collectives are needed, in words.
    """

    kind: str
    axes: tuple[str, ...]
    seconds: float
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class LayoutAlternative:
    """A value fixed to one layout, with everything else solved again.

    Attributes:
      spec: the layout as text; `partition_spec`: as a pin takes it.
      is_planned: whether it is the plan's own.
      fits: whether a solution fits in memory; if not, times are infinite.
      step_s: predicted seconds of the step.
      stage_s: seconds of all tasks of the explained stage; on one mesh those of the
        step.
      bound_s: proved lower bound of `stage_s`.
      compute_s, communication_s: parts of `stage_s`; hidden communication is in
        neither.
      by_axes: (mesh axes, seconds of all their collectives, hidden or not).
      peak_bytes: peak memory of one device; the lowest peak found if nothing fits.
      is_brief: whether it was searched briefly, as layouts far from the best are:
        `step_s` is then that of a feasible plan, and a better one may exist.
      added: the collectives that differ from the plan, the most seconds first.
      cannot: why the value cannot have this layout at all; empty if it can.
    """

    spec: str
    partition_spec: Any
    is_planned: bool = False
    fits: bool = False
    step_s: float = math.inf
    bound_s: float = math.inf
    compute_s: float = 0.0
    communication_s: float = 0.0
    by_axes: tuple[tuple[tuple[str, ...], float], ...] = ()
    peak_bytes: int = 0
    is_brief: bool = False
    added: tuple[Added, ...] = ()
    cannot: str = ""
    stage_s: float = math.inf


@dataclass(frozen=True, slots=True, repr=False)
class Why(Displayed):
    """Explanation of a value's layout; `print` it to read it.

    Attributes:
      key: the key that was requested; `name`: name for display.
      type: element type and shape, as `bf16[64,192]`.
      source: the user's source line, for values inside of the program.
      spec: the plan's layout, as text.
      answer: the explanation in sentences.
      layouts: the plan's layout, then the alternatives, the fastest first.
      forces: constraints on the layout: pins, divisibility, memory, neighbours,
        recipes.
      planned_s: seconds of the plan's step, with no layout fixed.
      seconds: time that the explanation took.
      stage: the stage that all this is about, in a plan in stages; None: one mesh.
      stage_s: seconds of that stage in a step of the plan.
      also: explanations for the other stages that have such a value.
    """

    key: str
    name: str
    type: str
    source: str
    spec: str
    answer: tuple[str, ...]
    layouts: tuple[LayoutAlternative, ...]
    forces: tuple[str, ...]
    planned_s: float
    seconds: float
    stage: int | None = None
    stage_s: float = 0.0
    also: tuple[Why, ...] = ()

    def _sections(self, *, full: bool) -> tuple[Section, ...]:
        return _sections(self, full)

    def __repr__(self) -> str:
        at = "" if self.stage is None else f" on stage {self.stage}"
        return f"Why({self.name}: {self.spec}{at}; {len(self.layouts)} layouts)"


MAX_ROWS = 12
"""Maximum number of layouts in a table that is not full."""


def _sections(why: Why, full: bool) -> tuple[Section, ...]:
    every = (why, *why.also)
    return tuple(section for part in every for section in _tell_one(part, full))


def _tell_one(why: Why, full: bool) -> list[Section]:
    facts = [("layout", why.spec), ("array", why.type)]
    if why.source:
        facts.append(("made at", why.source))
    at = "" if why.stage is None else f" on stage {why.stage}"
    solved = [x for x in why.layouts if not x.cannot]
    shown = solved if full else solved[:MAX_ROWS]
    axes = list(dict.fromkeys(a for x in shown for a, _ in x.by_axes))
    rows = tuple(_row(layout, axes, why) for layout in shown)
    over = ("+".join(a) for a in axes)
    header = ("layout", "step", "more", "compute", *over, "peak")
    if why.stage is not None:
        over = ("+".join(a) for a in axes)
        header = ("layout", "step", f"stage {why.stage}", "more", *over, "peak")
    table = Table(header, rows, "<" + ">" * (len(header) - 1), (0,))
    took = "Under mesh axes: their collectives, hidden or not."
    if why.seconds:  # shown once, with the first stage
        seconds = format_seconds(why.seconds)
        took = f"each fixed, everything else solved again: {seconds} in all. {took}"
    if any(x.is_brief for x in shown):
        took += " ≤: searched briefly."
    left = len(solved) - len(shown)
    if left:
        took += f" And {left} more layouts, all slower: table(full=True)."
    return [
        Section(f"why {why.name} is {why.spec}{at}", tuple(facts), lines=why.answer),
        *([Section(f"layouts{at}", table=table, lines=(took,))] if rows else []),
        *([Section("constraints on it", lines=why.forces)] if why.forces else []),
    ]


def _row(
    layout: LayoutAlternative, axes: Sequence[tuple[str, ...]], why: Why
) -> tuple[str, ...]:
    mark = " (the plan)" if layout.is_planned else ""
    peak = format_bytes(layout.peak_bytes) if layout.peak_bytes else ""
    if not layout.fits:
        return layout.spec + mark, "does not fit", "", "", *("" for _ in axes), peak
    most = "≤ " if layout.is_brief else ""
    seconds = dict(layout.by_axes)
    over = (format_seconds(seconds.get(a, 0.0)) for a in axes)
    step, took = format_seconds(layout.step_s), format_seconds(layout.compute_s)
    delta = more(layout.step_s - why.planned_s, why.planned_s)
    if why.stage is None:
        return layout.spec + mark, most + step, delta, took, *over, peak
    took = format_seconds(layout.stage_s)
    delta = more(layout.stage_s - why.stage_s, why.stage_s)
    return layout.spec + mark, most + step, took, delta, *over, peak


def more(delta_s: float, of_s: float) -> str:
    """Format a difference of steps, as `+1.2 ms (4 %)`.

    Args:
      delta_s: the difference in seconds; infinite: nothing fits.
      of_s: seconds that the share refers to.
    """
    if not math.isfinite(delta_s):
        return "does not fit"
    if abs(delta_s) < 1e-4 * of_s:  # the step is shown with three digits
        return "="
    sign = "+" if delta_s > 0 else "−"
    share = format_share(abs(delta_s) / of_s)
    return f"{sign}{format_seconds(abs(delta_s))} ({share})"
