"""Tables of a plan: values by path, collectives, and seconds by source line.

Repeated layers are folded into one row for values that differ only in a number:
`params['h'][0]['w']` … `params['h'][11]['w']` with the same shape, dtype and spec
become `params['h'][0..11]['w']`, 12 times.

Collectives are listed by kind and axes, then by the user's line; values by tree path,
with shape, spec and bytes on a device; a step's seconds by the user's source lines,
with the devices' utilisation (MFU).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rhino_jax.explain.report.section import Section, Table, first_rows
from rhino_jax.ir.spec import format_spec
from rhino_jax.plan.records import Collective, Traffic, traffic_of
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.units import (
    format_bytes,
    format_count,
    format_flops,
    format_seconds,
    format_share,
)


if TYPE_CHECKING:
    from rhino_jax.plan.plan import Leaf, PlanData
    from rhino_jax.plan.records import LineTime


_NUMBER = re.compile(r"\d+")
MIN_REPEATS = 3
"""Minimum number of equivalent paths that are folded; fewer are shown one by one."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Paths that are shown as one row.

    Attributes:
      label: the path, with the numbers that differ written as a range.
      members: positions of the folded paths.
    """

    label: str
    members: tuple[int, ...]


def fold(items: Iterable[tuple[str, Hashable]]) -> tuple[Fold, ...]:
    """Fold paths that differ only in numbers.

    Args:
      items: (path, key): only paths with equal keys are folded; for example shape and
        spec.

    Returns:
      Folds, in order of their first member.
    """
    paths: list[str] = []
    groups: dict[Hashable, list[int]] = {}
    for i, (path, rest) in enumerate(items):
        paths.append(path)
        groups.setdefault((_NUMBER.sub("#", path), rest), []).append(i)
    folds = []
    for members in groups.values():
        if len(members) < MIN_REPEATS:
            folds += [Fold(paths[i], (i,)) for i in members]
        else:
            folds.append(Fold(_label([paths[i] for i in members]), tuple(members)))
    return tuple(sorted(folds, key=lambda f: f.members[0]))


def _label(paths: Sequence[str]) -> str:
    """Return the common path, with the numbers that differ as ranges or lists."""
    columns = list(zip(*(_NUMBER.findall(p) for p in paths), strict=True))
    ranges = iter([_range(column) for column in columns])
    return _NUMBER.sub(lambda _: next(ranges), paths[0])


def _range(column: Sequence[str]) -> str:
    numbers = sorted({int(x) for x in column})
    low, high = numbers[0], numbers[-1]
    if low == high:
        return column[0]
    if len(numbers) == high - low + 1:
        return f"{low}..{high}"
    step = numbers[1] - low
    if all(b - a == step for a, b in itertools.pairwise(numbers)):
        return f"{low},{numbers[1]}..{high}" if len(numbers) > 2 else f"{low},{high}"
    return "*"


TOP_COLLECTIVES = 12


def collective_sections(plan: PlanData, *, full: bool) -> tuple[Section, ...]:
    """Return the sections of totals by kind and axes, and by source line."""
    if not plan.collectives:
        none = "none: no device talks to another."
        if plan.has_tasks:
            none = "none within a stage; above is what stages send to each other."
        return (Section("collectives", lines=(none,)),)
    totals = traffic_of(plan.collectives)
    rows = tuple(
        (kind, format_axes(axes), *_numbers(t)) for (kind, axes), t in totals.items()
    )
    seconds = sum(t.seconds for t in totals.values())
    wire_bytes = sum(t.bytes for t in totals.values())
    return (
        Section(
            f"collectives: {format_bytes(wire_bytes)} on the wire per device,"
            f" {format_seconds(seconds)} if nothing is hidden",
            table=Table(
                ("kind", "axes", "count", "bytes", "time"),
                rows,
                "<<>>>",
                (1,),
                tuple(t.seconds / seconds if seconds else 0.0 for t in totals.values()),
            ),
        ),
        _sources(plan, full=full),
    )


def format_axes(axes: tuple[str, ...]) -> str:
    return " × ".join(axes) if axes else "-"


def _sources(plan: PlanData, *, full: bool) -> Section:
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for c in plan.collectives:
        key = (c.kind, format_axes(c.axes), c.source)
        # In the full table, only collectives equal in every column share a row.
        groups.setdefault((*key, c.reason, c.op) if full else key, []).append(c)
    entries = [(key, _sum(members), members) for key, members in groups.items()]
    entries.sort(key=lambda e: (-e[1].seconds, -e[1].bytes))
    rows = []
    for (kind, axes, source, *_), total, members in entries:
        # The full table names the function; here the reason needs the width.
        line = source if full else source.partition(" (")[0]
        rows.append((kind, axes, *_numbers(total), line, _why(members)))
    table = Table(
        ("kind", "axes", "count", "bytes", "time", "source", "why"),
        tuple(rows),
        "<<>>><<",
        (6, 5, 1),
        below=6,
    )
    return first_rows(
        "where they come from",
        table,
        None if full else TOP_COLLECTIVES,
        [total.seconds for _, total, _ in entries],
        format_seconds,
    )


def _why(members: Sequence[Collective]) -> str:
    """Return the most frequent reason, layers folded, and the count of others."""
    folds = fold((why, ()) for why in dict.fromkeys(c.reason or c.op for c in members))
    first = max(folds, key=lambda f: len(f.members))
    rest = len(folds) - 1
    return f"{first.label}; and {rest} more" if rest else first.label


def _numbers(total: Traffic) -> tuple[str, str, str]:
    return (
        format_count(total.count),
        format_bytes(total.bytes),
        format_seconds(total.seconds),
    )


def _sum(members: Sequence[Collective]) -> Traffic:
    return Traffic(
        sum(c.count for c in members),
        sum(c.bytes for c in members),
        sum(c.seconds for c in members),
    )


TOP_VALUES = 24


def value_sections(plan: PlanData, *, full: bool) -> tuple[Section, ...]:
    """Return the sections of inputs, and of outputs that are not next state."""
    inputs = _section("inputs", plan, plan.inputs, full=full)
    if full:
        return inputs, _section("outputs", plan, plan.outputs, full=True)
    held = {(x.path, x.shape, x.dtype, x.spec) for x in plan.inputs}
    new = [
        x
        for x in plan.outputs
        if (x.path.removeprefix(STATE_PREFIX), x.shape, x.dtype, x.spec) not in held
    ]
    outputs = _section("outputs", plan, new, full=False)
    same = len(plan.outputs) - len(new)
    if not same:
        return inputs, outputs
    line = f"{format_count(same)} of state, with the specs of the inputs they replace"
    lines = (*outputs.lines, line)
    return inputs, replace(outputs, lines=lines)


STATE_PREFIX = "out: "
"""Prefix of the path of a result that replaces the argument of that path."""


def _section(
    title: str, plan: PlanData, leaves: Sequence[Leaf], *, full: bool
) -> Section:
    names = [name for name, _ in plan.mesh_axes]
    specs = [format_spec(leaf.spec, names) for leaf in leaves]
    if full:
        folds: Sequence[Fold] = [Fold(leaf.path, (i,)) for i, leaf in enumerate(leaves)]
    else:
        keys = (
            (x.path, (x.shape, x.dtype, spec))
            for x, spec in zip(leaves, specs, strict=True)
        )
        folds = fold(keys)

    def bytes_of(item: Fold) -> int:
        return sum(leaves[i].bytes_per_device for i in item.members)

    ordered = folds if full else sorted(folds, key=lambda f: -bytes_of(f))
    held = [bytes_of(item) for item in ordered]
    total = sum(held)
    rows = []
    for item, size in zip(ordered, held, strict=True):
        leaf, count = leaves[item.members[0]], len(item.members)
        rows.append(
            (
                item.label,
                f"{count}x" if count > 1 else "",
                format_array(leaf.shape, leaf.dtype),
                specs[item.members[0]],
                format_bytes(size),
            )
        )
    shares = tuple(size / total if total else 0.0 for size in held)
    table = Table(
        ("path", "", "array", "spec", "per device"),
        tuple(rows),
        "<><<>",
        (0, 3, 2),
        shares,
    )
    whole = sum(leaf.bytes_per_device * _cuts(leaf, plan) for leaf in leaves)
    noun = "array" if len(leaves) == 1 else "arrays"
    return first_rows(
        f"{title}: {format_count(len(leaves))} {noun}, {format_bytes(total)} per"
        f" device ({format_bytes(whole)} in all)",
        table,
        None if full else TOP_VALUES,
        held,
        lambda size: f"{format_bytes(size)} per device",
        counts=[len(item.members) for item in ordered],
    )


def _cuts(leaf: Leaf, plan: PlanData) -> int:
    """Return the number of shards of a value, on the mesh of its stages."""
    sizes = [size for _, size in plan.stages[leaf.stage].mesh_axes]
    if leaf.num_stages > 1:
        at = [name for name, _ in plan.mesh_axes].index(STAGE_AXIS)
        last = leaf.stage + leaf.num_stages
        sizes[at] = sum(stage.places for stage in plan.stages[leaf.stage : last])
    return math.prod(sizes[a] for dim in leaf.spec for a in dim)


_SHORT = {
    "float": "f",
    "bfloat": "bf",
    "int": "i",
    "uint": "u",
    "complex": "c",
}


def format_array(shape: Sequence[int], dtype: str) -> str:
    """Format shape and dtype as JAX prints types: `f32[8,128]`."""
    kind = dtype.rstrip("0123456789")
    short = _SHORT.get(kind, kind) + dtype[len(kind) :]
    return f"{short}[{','.join(str(d) for d in shape)}]"


TOP_LINES = 12


def utilisation(plan: PlanData) -> tuple[tuple[str, str], ...]:
    """Return the fact on model FLOPs utilisation (MFU); empty without FLOPs."""
    if not plan.model_flops.flops:
        return ()
    return (
        (
            "MFU",
            f"{format_share(plan.mfu)}: {format_flops(plan.model_flops.flops)} of the"
            " model's products, without what is recomputed, over peak × devices × step",
        ),
    )


def by_line(plan: PlanData, *, full: bool) -> Section:
    """Return the section on seconds by source line, forward plus backward."""
    whole_s = sum(line.seconds for line in plan.line_times)
    if not whole_s:
        return Section("")
    rows = tuple(
        (
            _line(line),
            format_seconds(line.seconds),
            format_share(line.seconds / whole_s),
            line.bound,
            format_flops(line.flops) if line.flops else "",
        )
        for line in plan.line_times
    )
    bounds: dict[str, float] = {}
    for line in plan.line_times:
        for name, seconds in line.parts:
            bounds[name] = bounds.get(name, 0.0) + seconds
    parts = ", ".join(
        f"{name} {format_share(seconds / whole_s)}"
        for name, seconds in sorted(bounds.items(), key=lambda b: -b[1])
        if seconds
    )
    mean = ", the mean over devices" if plan.has_tasks else ""
    table = Table(
        ("line", "time", "share", "bound by", "per device"),
        rows,
        "<>><>",
        (0,),
        tuple(line.seconds / whole_s for line in plan.line_times),
    )
    return first_rows(
        f"where the step's {format_seconds(whole_s)} go, forward and backward{mean}",
        table,
        None if full else TOP_LINES,
        [line.seconds for line in plan.line_times],
        format_seconds,
        lines=[f"bounded by {parts}"],
    )


def _line(line: LineTime) -> str:
    """Return the source line, or for time without one its cause."""
    if line.source:
        return line.source if line.source != "?" else "added by passes"
    return {
        "other stages": "waiting for other stages",
        "communication": "moving arguments and results",
    }.get(line.bound, "copies between layouts")
