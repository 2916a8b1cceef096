"""The values of a plan by tree path: shape, spec and bytes on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rhino_jax.explain.report.folding import Fold, fold
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.ir.spec import format_spec
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.units import format_bytes, format_count


if TYPE_CHECKING:
    from rhino_jax.plan.plan import Leaf, PlanData

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
    line = f"{format_count(same)} of state, laid out as the inputs they replace"
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
    shown = ordered if full else ordered[:TOP_VALUES]
    rest = ordered[len(shown) :]
    total = sum(leaf.bytes_per_device for leaf in leaves)
    rows = []
    for item in ordered:
        leaf, count = leaves[item.members[0]], len(item.members)
        rows.append(
            (
                item.label,
                f"{count}x" if count > 1 else "",
                format_array(leaf.shape, leaf.dtype),
                specs[item.members[0]],
                format_bytes(bytes_of(item)),
            )
        )
    shares = tuple(bytes_of(f) / total if total else 0.0 for f in ordered)
    table = Table(
        ("path", "", "array", "spec", "per device"),
        tuple(rows),
        "<><<>",
        (0, 3, 2),
        shares,
    )
    lines = []
    if rest:
        count = sum(len(f.members) for f in rest)
        lines.append(
            f"and {format_count(count)} more:"
            f" {format_bytes(sum(bytes_of(f) for f in rest))} per device"
        )
    whole = sum(leaf.bytes_per_device * _cuts(leaf, plan) for leaf in leaves)
    noun = "array" if len(leaves) == 1 else "arrays"
    return Section(
        f"{title}: {format_count(len(leaves))} {noun}, {format_bytes(total)} per"
        f" device ({format_bytes(whole)} in all)",
        table=table.rows_of(0, len(shown)),
        lines=tuple(lines),
        rest=table.rows_of(len(shown), len(ordered)),
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
