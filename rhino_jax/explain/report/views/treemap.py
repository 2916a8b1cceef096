"""State and activations as areas, coloured by the mesh axes that shard them.

`regions` shows the program as nested regions: source lines that unfold to ops with
their specs.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from rhino_jax.explain.report.tables import fold, format_array
from rhino_jax.explain.report.views.boxes import HUES, KEYS, box, colour, legend
from rhino_jax.ir.program import Op, Program, Region
from rhino_jax.ir.spec import format_spec
from rhino_jax.units import format_bytes, format_flops


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData


MAX_OPS = 1500
"""Maximum number of ops written, about a megabyte; `str(program)` shows all."""


def regions(plan: PlanData) -> str:
    """Draw the planned program; empty if it is unknown, or has stages."""
    traced = plan.traced
    for transform in plan.transforms:
        if traced is not None and transform.choice:
            traced = traced.after_passes.get((transform.name, transform.choice))
    if traced is None or plan.has_tasks:
        return ""
    program = traced.program
    writer = _Writer(program, plan, itertools.count())
    inside = "".join(writer.region(program.body))
    more = len(program.ops) - MAX_OPS
    note = f"<p>and {more:,} ops more</p>" if more > 0 else ""
    return f'<div class="program" style="text-align:left">{inside}{note}</div>'


@dataclass(frozen=True, slots=True)
class _Writer:
    program: Program
    plan: PlanData
    written: Iterator[int]

    def region(self, region: Region) -> Iterator[str]:
        """Yield elements of a region, consecutive ops of one source line in one."""
        ops = [self.program.ops[i] for i in region.ops]
        for line, group in itertools.groupby(ops, key=lambda op: str(op.source)):
            members = list(group)
            last = members[-1]
            flops = sum(op.flops for op in members)
            said = f"{len(members)} ops" if len(members) > 1 else last.name
            if flops:
                said += f", {format_flops(flops)}"
            inside = "".join(self.op(op) for op in members)
            if not inside:
                return
            yield (
                f'<details class="ops"><summary><code>{escape(line)}</code>'
                f" {escape(said)} → {self.made(last)}</summary>{inside}</details>"
            )

    def op(self, op: Op) -> str:
        if next(self.written) >= MAX_OPS:
            return ""
        label = f" {escape(op.label)}" if op.label else ""
        said = f"{escape(op.name)}{label} → {self.made(op)}"
        if op.call is None:
            return f'<div class="op">{said}</div>'
        parts = "".join(x for r in op.call.regions for x in self.region(r))
        count = f", {op.call.trip_count:,} times" if op.call.trip_count > 1 else ""
        return (
            f'<details class="ops"><summary>{op.call.kind.value}{count}: {said}'
            f"</summary>{parts}</details>"
        )

    def made(self, op: Op) -> str:
        names = [name for name, _ in self.plan.mesh_axes]
        specs = self.plan.decisions.values
        shown = []
        for v in op.results[:2]:
            value = self.program.values[v]
            spec = specs.get(v)
            text = format_array(value.shape, value.dtype)
            shown.append(f"{text} {format_spec(spec, names)}" if spec else text)
        more = " …" if len(op.results) > len(shown) else ""
        return f"<code>{escape('; '.join(shown))}{more}</code>"


MOST = 60
"""Maximum number of areas; the smaller ones are merged, as they could not be told
apart."""

ASPECT = 3.0
"""Ratio of the drawing's width to its height, at common page widths."""


@dataclass(frozen=True, slots=True)
class Area:
    """Memory of one value or group of values.

    Attributes:
      name: tree path, or description.
      bytes: bytes on one device.
      spec: spec as text; empty if it is not known.
      is_argument: whether it is an argument, not an activation.
    """

    name: str
    bytes: int
    spec: str
    is_argument: bool

    @property
    def cut(self) -> tuple[str, ...]:
        """Names of the mesh axes that shard it."""
        return tuple(sorted(re.findall(r"'([^']+)'", self.spec)))


def treemap(plan: PlanData) -> str:
    """Draw arguments, and what else is live at the peak, as a treemap."""
    areas = sorted(_areas(plan), key=lambda a: -a.bytes)
    rest = sum(a.bytes for a in areas[MOST:])
    areas = areas[:MOST]
    if rest:
        areas.append(Area("the rest", rest, "", False))
    areas = [a for a in areas if a.bytes > 0]
    if not areas:
        return ""
    cuts = sorted({a.cut for a in areas if a.cut}, key=lambda c: (len(c), c))
    hues = {cut: HUES[i % len(HUES)] for i, cut in enumerate(cuts)}
    boxes = [
        box(
            x,
            w,
            colour(hues.get(a.cut), 0.45 if a.is_argument else 0.2),
            title=f"{a.name}: {format_bytes(a.bytes)} {a.spec}",
            labels=labels,
            lines=int(h / LINE_PERCENT),
            top=y,
            height=h,
        )
        for a, labels, (x, y, w, h) in zip(
            areas, _labels(areas), squarified([a.bytes for a in areas]), strict=True
        )
    ]
    keys = [(colour(hues[c], 0.45), f"sharded over {' × '.join(c)}") for c in cuts]
    keys.append((colour(None, 0.45), "replicated"))
    keys.append((colour(None, 0.2), "pale: activations at the peak"))
    return (
        '<div class="treemap"><div class="boxes" style="position:relative;'
        f'height:18em;width:100%">{"".join(boxes)}</div>{legend(keys)}</div>'
    )


LINE_PERCENT = 8.0
"""Percent of the height that a line of text needs."""


def _labels(areas: Sequence[Area]) -> list[list[str]]:
    """Return the labels of each area that no other area could have, longest first."""
    forms = [dict.fromkeys(_forms(area.name)) for area in areas]
    count = Counter(form for every in forms for form in every)
    return [
        sorted((f for f in every if count[f] == 1), key=lambda f: -len(f))
        for every in forms
    ]


def _forms(name: str) -> Iterator[str]:
    """Yield a name, and shorter forms of it.

    Of a path these are its last keys, and one earlier key with the last, as `mu…up`; of
    an activation, what made it with its line or with what it read, and its type.
    """
    yield name
    words = name.split(" ")
    if ", " in name:
        yield f"{words[0]} {name.rpartition(', ')[2]}"
    if len(words) > 1:
        whole = [i for i, word in enumerate(words) if word.endswith("]")]
        for i in whole[:1]:
            yield " ".join(words[: i + 1])
            yield " ".join([*words[:i], *words[i + 1 : i + 2]])
            yield words[i]
        yield words[0]
        return
    keys = KEYS.findall(name)
    yield from (".".join(keys[begin:]) for begin in range(len(keys)))
    yield from (f"{key}…{keys[-1]}" for key in keys[:-2])


def _areas(plan: PlanData) -> Iterator[Area]:
    names = [name for name, _ in plan.mesh_axes]
    items = [
        (leaf.path, (leaf.shape, leaf.dtype, format_spec(leaf.spec, names)))
        for leaf in plan.inputs
    ]
    for found in fold(items):
        leaf = plan.inputs[found.members[0]]
        total = sum(plan.inputs[i].bytes_per_device for i in found.members)
        yield Area(found.label, total, format_spec(leaf.spec, names), True)
    known = {leaf.path for leaf in plan.inputs}
    for holding in plan.at_peak:
        if holding.what not in known:
            name = f"{holding.what} {holding.place}".strip()
            yield Area(name, holding.bytes, holding.spec, False)


def squarified(
    sizes: Sequence[float],
) -> list[tuple[float, float, float, float]]:
    """Return (left, top, width, height) of areas in percent, the largest first.

    Source: M. Bruls, K. Huizing, J. van Wijk, "Squarified Treemaps" (2000).
    """
    total = sum(sizes)
    left, top, width, height = 0.0, 0.0, 100.0 * ASPECT, 100.0
    scaled = [s / total * width * height for s in sizes]
    found: list[tuple[float, float, float, float]] = []
    at = 0
    while at < len(scaled):
        side = min(width, height)
        end = at + 1
        while end < len(scaled) and _worst(scaled[at : end + 1], side) <= _worst(
            scaled[at:end], side
        ):
            end += 1
        depth = sum(scaled[at:end]) / side if side else 0.0
        offset = 0.0
        for s in scaled[at:end]:
            length = s / depth if depth else 0.0
            if width >= height:
                found.append((left, top + offset, depth, length))
            else:
                found.append((left + offset, top, length, depth))
            offset += length
        if width >= height:
            left, width = left + depth, width - depth
        else:
            top, height = top + depth, height - depth
        at = end
    return [(x / ASPECT, y, w / ASPECT, h) for x, y, w, h in found]


def _worst(row: Sequence[float], side: float) -> float:
    whole = sum(row)
    if not whole or not side:
        return float("inf")
    return max(side**2 * max(row) / whole**2, whole**2 / (side**2 * min(row)))
