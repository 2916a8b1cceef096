"""State and activations as areas, coloured by the mesh axes that shard them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rhino_jax.explain.report.folding import fold
from rhino_jax.explain.report.views.boxes import HUES, box, colour, legend
from rhino_jax.ir.spec import format_spec
from rhino_jax.units import format_bytes


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData

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
      cut: names of the mesh axes that shard it; None if that is not known.
      spec: spec as text.
    """

    name: str
    bytes: int
    cut: tuple[str, ...] | None
    spec: str


def treemap(plan: PlanData) -> str:
    """Draw arguments, and what else is live at the peak, as a treemap."""
    areas = sorted(_areas(plan), key=lambda a: -a.bytes)
    rest = sum(a.bytes for a in areas[MOST:])
    areas = areas[:MOST]
    if rest:
        areas.append(Area("the rest", rest, None, ""))
    areas = [a for a in areas if a.bytes > 0]
    if not areas:
        return ""
    cuts = sorted({a.cut for a in areas if a.cut}, key=lambda c: (len(c), c))
    hues = {cut: HUES[i % len(HUES)] for i, cut in enumerate(cuts)}
    boxes = [
        box(
            x,
            w,
            colour(hues.get(a.cut or ()), 0.45 if a.cut is not None else 0.15),
            title=f"{a.name}: {format_bytes(a.bytes)} {a.spec}",
            label=a.name.partition(" ")[0] if h > _LABELLED else "",
            top=y,
            height=h,
        )
        for a, (x, y, w, h) in zip(
            areas, squarified([a.bytes for a in areas]), strict=True
        )
    ]
    keys = [(colour(hues[c], 0.45), f"cut over {' × '.join(c)}") for c in cuts]
    keys.append((colour(None, 0.45), "whole on each device"))
    keys.append((colour(None, 0.15), "activations at the peak, as they are cut"))
    return (
        '<div class="treemap"><div class="boxes" style="position:relative;'
        f'height:18em;width:100%">{"".join(boxes)}</div>{legend(keys)}</div>'
    )


_LABELLED = 8.0
"""Percent of the height that a line of text needs; smaller areas have no label."""


def _areas(plan: PlanData) -> Iterator[Area]:
    names = [name for name, _ in plan.mesh_axes]
    items = [
        (leaf.path, (leaf.shape, leaf.dtype, format_spec(leaf.spec, names)))
        for leaf in plan.inputs
    ]
    for found in fold(items):
        leaf = plan.inputs[found.members[0]]
        total = sum(plan.inputs[i].bytes_per_device for i in found.members)
        cut = tuple(names[a] for a in sorted({a for dim in leaf.spec for a in dim}))
        yield Area(found.label, total, cut, format_spec(leaf.spec, names))
    known = {leaf.path for leaf in plan.inputs}
    for holding in plan.at_peak:
        if holding.what not in known:
            yield Area(f"{holding.what} {holding.place}", holding.bytes, None, "")


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
