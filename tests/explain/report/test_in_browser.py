"""Reports as a browser lays them out, under Jupyter's own style sheets."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.explain.report.html import page
from rhino_jax.explain.report.views.page import plan_page
from tests.explain.report.browser import find_browser, measure, notebook_page
from tests.plan.samples import sample_plan


pytestmark = pytest.mark.browser

PAGES = ("lab light", "lab dark", "classic light", "file")
WIDTHS = (700, 1400)
NUMBERS = {
    "count", "bytes", "time", "share", "per device", "step time", "to this", "peak",
    "communication", "objective", "to best", "predicted", "compiled", "as it is",
    "predicted to compiled", "rhino's plan", "rhino's to it", "B to A",
    "worth", "bytes per device", "budget", "batch", "stages", "micro-batches", "step",
    "USD per 1M steps",
    "points", "groups", "planned", "modelled", "searches", "reused", "ruled out",
    "processes", "CPU s", "s",
    "stage", "chunk", "forward", "backward", "update", "tasks take up to",
    "compute", "data", "model", "data+model", "more", "stage 0",
}  # fmt: skip
"""Columns of numbers, which are aligned at the right."""


def step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        h = jax.nn.relu(batch @ p["mlp"]["up_projection"])
        return jnp.mean((h @ p["mlp"]["down_projection"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(*specs: P) -> tuple[Any, Any]:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    shapes = ((512, 2048), (2048, 512), (64, 512))
    up, down, batch = (
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )
    return {"mlp": {"up_projection": up, "down_projection": down}}, batch


@pytest.fixture(scope="module")
def reports() -> list[str]:
    """A plan, its verification, an audit, a plan of long names, what differs from
    Megatron's plan, a sweep, why an array is laid out so; and a plan in stages, its
    verification, and why an array is there."""
    find_browser()
    args = arguments(P("data", "model"), P(), P("data"))
    options: dict[str, Any] = {"progress": False, "donate_argnums": 0}
    plan = rhino.plan(step, *args, mesh={"data": 2, "model": 4}, **options)
    verified = plan.verify(step, *args)
    audit = rhino.audit(step, *args, **options)
    change = rhino.diff(plan.recipe("megatron"), plan)
    sweep = rhino.sweep(
        step,
        *args,
        hardware=["v5e", "h100", "v6e"],
        devices=[2, 4, 8],
        memory_budget_bytes=[None, "3MiB"],
        **options,
    )
    path = "params['mlp']['up_projection']"
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    staged = rhino.plan(
        step,
        *shapes,
        mesh={"stage": 2, "data": 2, "model": 2},
        microbatches=4,
        schedule="1f1b",
        **options,
    )
    of_one = (plan, verified, audit, long_plan(), change, sweep, plan.why(path))
    found = (*of_one, staged, staged.verify(step, *shapes), staged.why(path))
    return [x._repr_html_() for x in found]


def long_plan() -> Any:
    plan = sample_plan()
    first, *others = plan.inputs
    path = "opt_state[0].inner_state['trainable'].mu['encoder']['layers'][11]['out']"
    leaf = dataclasses.replace(first, path=path, dtype="bfloat16")
    sent = dataclasses.replace(
        plan.collectives[0],
        axes=("data", "model"),
        source="a_rather_long_module_name.py:1234 (transformer_block)",
        reason=f"gathers {path}: P('data', ('model', 'expert')) → P()",
    )
    return sample_plan(inputs=(leaf, *others), collectives=(sent, plan.collectives[1]))


@pytest.fixture(scope="module", params=[f"{p} {w}" for p in PAGES for w in WIDTHS])
def measured(
    request: Any, reports: list[str], tmp_path_factory: Any
) -> tuple[str, list[dict[str, Any]]]:
    """Name of a page with its width, and what the browser makes of its reports."""
    kind, _, width = request.param.rpartition(" ")
    if kind == "file":
        text = page("\n".join(reports), title="plan")
    else:
        template, theme = kind.split()
        text = notebook_page(reports, template=template, theme=theme)
    folder = tmp_path_factory.mktemp("page")
    found = measure(text, int(width), folder, request.param)
    assert len(found) == len(reports)
    return request.param, found


def tables(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for report in found:
        yield from report["tables"]


def cells(found: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(its column, the cell) of all that stand in tables."""
    for table in tables(found):
        names = [h["text"] for h in table["header"]] or ["name", "value"]
        assert names
        for row in table["rows"]:
            yield from zip(names, row, strict=True)


def test_the_text_is_at_the_left_and_numbers_at_the_right(measured: Any) -> None:
    _, found = measured
    wrong = [
        (name, cell["text"], cell["align"])
        for name, cell in cells(found)
        # "per device" heads also the names of quantities, "A" and "B" specs too.
        if cell["text"]
        and (name in NUMBERS) != (cell["align"] == "right")
        and name not in ("", "per device", "compiled peak", "A", "B")
    ]
    assert not wrong, " | ".join(sorted({name for name, *_ in wrong}))


def test_bars_grow_from_the_left(measured: Any) -> None:
    _, found = measured
    bars = [(c["bar"], c["box"], c["padding"]) for _, c in cells(found) if c["bar"]]
    assert len(bars) > 20
    for bar, cell, padding in bars:
        assert abs(bar["left"] - cell["left"] - padding) < 1
        assert bar["right"] <= cell["right"] + 1


def test_kinds_of_collectives_are_not_broken(measured: Any) -> None:
    _, found = measured
    kinds = [cell for name, cell in cells(found) if name in ("kind", "axes")]
    assert len(kinds) > 8
    assert all(cell["isOnOneLine"] for cell in kinds)
    assert not any(cell["broken"] for _, cell in cells(found))


def test_nothing_lies_over_anything_else(measured: Any) -> None:
    _, found = measured
    for table in tables(found):
        for row in (table["header"], *table["rows"]):
            for cell in row:
                if cell["text"]:
                    assert cell["content"]["left"] >= cell["box"]["left"] - 1, cell
                    assert cell["content"]["right"] <= cell["box"]["right"] + 1, cell
            for a, b in itertools.pairwise(row):
                assert a["box"]["right"] <= b["box"]["left"] + 1


def test_nothing_is_cut_off(measured: Any) -> None:
    """What is wider than the page can be scrolled to; it is not where there is room."""
    name, found = measured
    for report in found:
        assert report["box"]["right"] <= report["window"] + 1
        assert not any(p["isCut"] for p in report["paragraphs"])
        for table in report["tables"]:
            is_inside = table["box"]["right"] <= table["room"]["right"] + 1
            # The classic page leaves a narrow window half of its width; and layouts
            # have a column for every set of mesh axes.
            is_wide = name == "classic light 700" or len(table["header"]) > 6
            assert is_inside or (
                name.endswith(" 700") and is_wide and table["canScroll"]
            )


def test_text_stands_out_from_what_is_behind_it(measured: Any) -> None:
    name, found = measured
    for report in found:
        behind = luminance(report["background"])
        assert (behind < 0.2) == ("dark" in name)
        for table in report["tables"]:
            for row in table["rows"]:
                for cell in row:
                    colors = [cell["color"], cell["codeColor"]]
                    for color in filter(None, colors):
                        assert contrast(luminance(color), behind) >= 7
                    assert cell["codeBackground"] in (None, "rgba(0, 0, 0, 0)")


def test_drawings_stay_where_they_belong(measured: Any) -> None:
    """Every box lies inside of its drawing, and its text inside of the box."""
    _, found = measured
    tracks = [track for report in found for track in report["boxes"]]
    assert len(tracks) > 8
    for track in tracks:
        room = track["room"]
        assert room["right"] - room["left"] > 100
        for b in track["boxes"]:
            at = b["box"]
            assert at["left"] >= room["left"] - 1 and at["right"] <= room["right"] + 1.5
            assert at["top"] >= room["top"] - 1 and at["bottom"] <= room["bottom"] + 1
            assert not b["isCut"], b["text"]
            assert b["align"] == "left"


def test_areas_of_a_map_do_not_overlap(measured: Any) -> None:
    _, found = measured
    maps = [t for report in found for t in report["boxes"] if t["isMap"]]
    assert maps
    for areas in maps:
        boxes = [b["box"] for b in areas["boxes"]]
        for a, b in itertools.combinations(boxes, 2):
            across = min(a["right"], b["right"]) - max(a["left"], b["left"])
            down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
            assert across < 1 or down < 1


def test_compared_bars_begin_at_the_left_one_below_the_other(measured: Any) -> None:
    _, found = measured
    tracks = [t for report in found for t in report["compared"]]
    names = {t["name"] for t in tracks}
    assert {"step time", "peak memory", "sent over data × model"} <= names
    for track in tracks:
        lines: dict[int, list[Any]] = {}
        for b in track["boxes"]:
            lines.setdefault(round(b["box"]["top"]), []).append(b)
        assert len(lines) in (1, 2)
        for line in lines.values():
            *parts, words = line
            assert words["text"] and not any(p["text"] for p in parts)
            at = track["room"]["left"]
            for part in line:
                assert abs(part["box"]["left"] - at) < 1
                at = part["box"]["right"]
            assert parts or words["text"] in ("0 B", "-")
        ends = [line[0]["box"]["bottom"] for _, line in sorted(lines.items())]
        begins = [line[0]["box"]["top"] for _, line in sorted(lines.items())]
        assert all(a <= b for a, b in zip(ends, begins[1:], strict=False))


def test_points_lie_inside_of_their_plot_and_ticks_apart(measured: Any) -> None:
    _, found = measured
    plots = [plot for report in found for plot in report["plots"]]
    assert len(plots) == 2  # price and memory
    for plot in plots:
        room, outer = plot["room"], plot["outer"]
        assert room["right"] - room["left"] > 100 and len(plot["dots"]) > 8
        for dot in plot["dots"]:
            at = dot["box"]
            assert room["left"] <= at["left"] and at["right"] <= room["right"]
            assert room["top"] <= at["top"] and at["bottom"] <= room["bottom"]
            assert "Point(" in dot["title"] and "price" in dot["title"]
        marked = [d for d in plot["dots"] if d["isMarked"]]
        assert 1 < len(marked) < len(plot["dots"])
        # The fastest is never beaten, and stands at the left.
        least = min(d["box"]["left"] for d in plot["dots"])
        assert any(d["box"]["left"] - least < 1 for d in marked)
        assert len(plot["ticks"]) == 6
        for tick in plot["ticks"]:
            at = tick["box"]
            assert outer["left"] - 1 <= at["left"] and at["right"] <= outer["right"] + 1
        for a, b in itertools.combinations([t["box"] for t in plot["ticks"]], 2):
            across = min(a["right"], b["right"]) - max(a["left"], b["left"])
            down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
            assert across < 1 or down < 1


def test_shards_stand_side_by_side_with_their_devices(measured: Any) -> None:
    name, found = measured
    drawn = [shard for report in found for shard in report["shards"]]
    assert len(drawn) > 5
    for one in drawn:
        assert one["box"]["right"] - one["box"]["left"] > 100
        for cell in one["cells"]:
            assert cell["text"] and not cell["isCut"], (name, cell)
        for a, b in itertools.combinations([c["box"] for c in one["cells"]], 2):
            across = min(a["right"], b["right"]) - max(a["left"], b["left"])
            down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
            assert across < 1 or down < 1


@pytest.mark.parametrize("width", [500, 1400])
def test_tables_that_scroll_say_so_and_no_others(tmp_path: Path, width: int) -> None:
    """500 pixels are the narrowest window that Chromium opens without a screen."""
    find_browser()
    (found,) = measure(plan_page(long_plan()), width, tmp_path, f"phone {width}")
    wide = [table["isWide"] for table in found["tables"]]
    assert any(wide) == (width == 500)
    for table in found["tables"]:
        assert table["isWide"] == ("scroll sideways" in table["hint"])
    assert found["box"]["right"] <= found["window"] + 1


def luminance(color: str) -> float:
    """Relative luminance of `rgb(…)`. Source: WCAG 2.1, section 1.4.3."""
    parts = [float(x) / 255 for x in re.findall(r"[\d.]+", color)[:3]]
    linear = [
        x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)
