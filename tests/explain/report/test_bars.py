"""Bars and points, as HTML: what is drawn, to which scale, and what is left out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rhino_jax.explain.report.views.bars import (
    Bar,
    Quantity,
    amount,
    bars,
    peak_of,
    step_of,
)
from rhino_jax.explain.report.views.boxes import box
from rhino_jax.explain.report.views.scatter import Dot, PlotAxis, scatter
from rhino_jax.plan.records import Predicted
from rhino_jax.units import format_bytes, format_seconds
from tests.explain.report.test_html import read


PLANNED = Predicted(4e-3, 3e-3, 1e-3, 2**30, 1.0)
MADE = Predicted(8e-3, 4e-3, 4e-3, 2**29, 1.0)
SIDES = ("predicted", "compiled")


def widths(html: str) -> list[float]:
    """Of all bars, without the words beside them."""
    found = re.findall(r'title="[^"]*" style="[^"]*?width:([\d.]+)%', html)
    return [float(x) for x in found]


def test_bars_are_as_long_as_what_they_show() -> None:
    html = bars([step_of((PLANNED, MADE)), peak_of((PLANNED, MADE))], SIDES)
    compute, rest, made_compute, made_rest, peak, made_peak = widths(html)
    assert (compute, rest) == pytest.approx((24.75, 8.25))
    assert (made_compute, made_rest) == pytest.approx((33, 33))
    assert (peak, made_peak) == pytest.approx((66, 33))
    said = " ".join(read(html).text)
    assert "8.00 ms (2.00x)" in said and "512 MiB (0.50x)" in said
    assert "pale: communication that compute does not hide" in said


def test_quantities_of_one_unit_have_one_scale() -> None:
    sent = [
        Quantity(f"over {axis}", "sent", (Bar(((size, "sent"),), str(size)),))
        for axis, size in {"data": 100.0, "model": 25.0}.items()
    ]
    assert widths(bars(sent, ("plan",))) == pytest.approx([66, 16.5])


def test_what_a_side_does_not_have_is_said() -> None:
    html = bars([peak_of((PLANNED, None))], SIDES)
    assert len(widths(html)) == 1
    assert "-" in read(html).text


@pytest.mark.parametrize(
    "nothing", [[], [amount("sent", [0, 0], format_bytes)], [peak_of((None, None))]]
)
def test_of_nothing_nothing_is_drawn(nothing: Any) -> None:
    assert bars(nothing, SIDES) == ""


def test_names_are_escaped() -> None:
    evil = "params['<b>&\"x']"
    for html in (
        bars([Quantity(evil, "x", (Bar(((1.0, evil),), evil),))], (evil,)),
        plot([Dot(1, 1, evil, evil, True), Dot(2, 2, "b", evil, False)]),
    ):
        assert "<b>" not in html
        assert evil in "".join(read(html).text)


def plot(dots: list[Dot]) -> str:
    return scatter(
        dots,
        PlotAxis("time", format_seconds),
        PlotAxis("peak", format_bytes),
        marks="best",
    )


def places(html: str) -> list[tuple[float, float]]:
    return [
        (float(x), float(y))
        for x, y in re.findall(r'class="dot[^>]*left:([\d.]+)%;bottom:([\d.]+)%', html)
    ]


def test_points_stand_by_their_values() -> None:
    dots = [Dot(x, y, "v5e", "", False) for x, y in ((1, 4), (2, 2), (3, 1))]
    (ax, ay), (bx, by), (cx, cy) = places(plot(dots))
    assert (ax, cx, ay, cy) == (4, 96, 96, 4)
    assert bx == 50 and by == pytest.approx(4 + 92 / 3, abs=0.01)


def test_a_wide_range_is_logarithmic() -> None:
    dots = [Dot(x, 1, "v5e", "", False) for x in (1, 10, 100)]
    assert [x for x, _ in places(plot(dots))] == [4, 50, 96]


def test_the_line_joins_those_that_nothing_beats() -> None:
    values = ((1, 4), (2, 5), (3, 1))
    html = plot([Dot(x, y, "v5e", "", False) for x, y in values])
    found = re.search(r'points="([^"]*)"', html)
    assert found is not None
    points = [tuple(map(float, p.split(","))) for p in found[1].split()]
    # Down in a step from the first to the last; (2, 5) is beaten by (1, 4).
    assert points == [(4.0, 27.0), (96.0, 27.0), (96.0, 96.0)]


def test_points_without_a_place_are_left_out() -> None:
    inf = float("inf")
    dots = [Dot(x, y, "v5e", "", False) for x, y in ((inf, 1), (1, 0), (1, 1))]
    assert plot(dots) == ""
    assert len(places(plot([*dots, Dot(2, 2, "h100", "", True)]))) == 2


def test_every_kind_has_a_colour_of_its_own() -> None:
    html = plot([Dot(i + 1, i + 1, f"m{i}", "", False) for i in range(11)])
    found = re.findall(r'class="dot[^>]*background:(hsla\(\d+)', html)
    assert len(found) == len(set(found)) == 11


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (60.0, "params[&#x27;mlp&#x27;][&#x27;down_projection&#x27;]"),
        (40.0, "mlp.down_projection"),
        (30.0, "down_projection"),
        (20.0, "down_proje…"),
        (5.0, ""),
    ],
)
def test_a_path_is_shortened_to_its_end(width: float, shown: str) -> None:
    path = "params['mlp']['down_projection']"
    html = box(0.0, width, "red", title=path, label=path)
    assert html.endswith(f">{shown}</div>")
