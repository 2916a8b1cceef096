"""The largest arrays as grids of their shards, with the devices that hold each, as
`jax.debug.visualize_array_sharding` draws them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from rhino_jax.explain.report.tables import Fold, fold, format_array
from rhino_jax.explain.report.views.boxes import HUES, colour
from rhino_jax.ir.spec import Spec, axes_of, format_spec, shards_per_dim


if TYPE_CHECKING:
    from rhino_jax.plan.plan import Leaf, PlanData


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
