"""Report of a suite of large clusters and deep models: CPU seconds of planning with
nothing specified, by pass, against devices and layers."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape

import rhino_jax as rhino
from rhino_jax.bench.planning import trace_workload
from rhino_jax.bench.rows.row_run import Found, Results, RowKind, TableLines
from rhino_jax.bench.rows.timed_plan import ADDITIONS, TimedPlan, yardstick_s
from rhino_jax.bench.suite import BenchRow
from rhino_jax.planner.search.passes import PASSES, measured_passes
from rhino_jax.units import format_seconds, format_share


ALLOWED_S = 30.0
"""CPU seconds that planning may take on any cluster, drawn as a line."""

_OTHER = "other"
"""Key of the seconds of no pass: passes of the program, stage cuts and schedules."""

_COLUMNS = (*(p.name for p in PASSES), _OTHER)

_WIDTH, _HEIGHT, _LEFT, _TOP, _PANEL = 960, 480, 60, 30, 320
_COLOURS = ("#3366cc", "#dc3912", "#109618", "#990099", "#ff9900", "#0099c6", "#994499")


def scale_row(row: BenchRow) -> TimedPlan:
    """Plan a row with nothing specified but the hardware; tracing is a pass, too."""
    workload, beside_s = row.make(), yardstick_s()
    sharded = rhino.auto_shard(
        workload.step, hardware=row.target, donate_argnums=workload.donate_argnums
    )
    started = time.process_time()
    traced = trace_workload(workload)
    trace_s = time.process_time() - started
    with measured_passes() as spent:
        plan = sharded.plan_options.plan(traced, None)
    cpu_s = {_COLUMNS[0]: trace_s, **spent}
    cpu_s[_OTHER] = time.process_time() - started - sum(cpu_s.values())
    return TimedPlan.of("auto", plan, cpu_s=cpu_s, yardstick_s=beside_s)


def layers_of(row: BenchRow) -> int:
    """Return the number of layers or blocks of a row's model; 0: it has none."""
    config = row.make().config
    named = {name: getattr(config, name) for name in config.__dataclass_fields__}
    found = [n for name, n in named.items() if name.endswith("_layers")]
    blocks = named.get("blocks", 0)
    levels = len(named.get("multipliers", (1,)))
    found += [levels * blocks] if isinstance(blocks, int) else blocks
    return sum(found)


def _table_lines(row: BenchRow, found: TimedPlan) -> TableLines:
    yield {
        "mesh": found.shape,
        "layers": str(layers_of(row)),
        "devices": f"{row.num_devices:,}",
        "stages": str(max(1, len(found.places))),
        "m": str(found.micro_batches),
        "step": format_seconds(found.step_s),
        "gap": format_share(found.gap),
        **{name: f"{found.cpu_s.get(name, 0.0):.1f}" for name in _COLUMNS},
        "CPU s": f"{found.total_s:.1f}",
        "yardstick s": f"{found.yardstick_s:.2f}",
    }


def _summary(suite: str, found: Found[TimedPlan]) -> Sequence[str]:
    """Return a line on the CPU seconds of all rows."""
    took = [plan.total_s for _, plan in found]
    slow, most_s = sum(s > ALLOWED_S for s in took), max(took)
    row, _ = found[took.index(most_s)]
    devices = max(row.num_devices for row, _ in found)
    return (
        f"`{suite}`, {len(found)} plans of up to {devices:,} devices:"
        f" {min(took):.1f} to {most_s:.1f} CPU seconds"
        f" ({row.workload} on {row.target}), {slow} above {ALLOWED_S:.0f}.",
    )


Curves = Mapping[str, list[tuple[float, float]]]
"""Name of a curve → its points."""


def scale_plot(results: Results[TimedPlan]) -> str:
    """Return an SVG: CPU seconds against devices, and against layers."""
    panels: dict[str, Curves] = {
        "devices": defaultdict(list),
        "layers": defaultdict(list),
    }
    for r in results:
        if r.found is None:
            continue
        if "num_layers" in dict(r.row.overrides):
            name, of, x = "layers", f"{r.row.model}, {r.row.target}", layers_of(r.row)
        else:
            kind = r.row.target.partition(":")[0]
            name, of, x = "devices", f"{r.row.workload}, {kind}", r.row.num_devices
        panels[name][of].append((x, r.found.total_s))
    drawn = "".join(
        _panel(_LEFT + _WIDTH // 2 * i, name, curves)
        for i, (name, curves) in enumerate(panels.items())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="11">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>{drawn}</svg>\n'
    )


def _panel(left: int, name: str, curves: Curves) -> str:
    """Draw named points over a logarithmic axis, from the bottom to `ALLOWED_S` and
    more, joined in the order of x."""
    every = [point for points in curves.values() for point in points]
    xs = sorted({x for x, _ in every if x > 0})
    if not xs:
        return ""
    most = 1.1 * max(ALLOWED_S, *(y for _, y in every))
    low, high = math.log(xs[0]), math.log(max(xs[-1], 2 * xs[0]))
    bottom, width = _TOP + _PANEL, _WIDTH // 2 - _LEFT - 40

    def across(x: float) -> float:
        return left + width * (math.log(x) - low) / (high - low)

    def up(y: float) -> float:
        return bottom - _PANEL * y / most

    def drawn() -> Iterator[str]:
        yield _line(left, bottom, left + width, bottom, "#888")
        yield _line(left, up(ALLOWED_S), left + width, up(ALLOWED_S), "#c00")
        for y in (0.0, ALLOWED_S / 3, 2 * ALLOWED_S / 3, ALLOWED_S):
            yield _text(left - 8, up(y) + 4, f"{y:.0f}", "end")
        for x in xs:
            yield _text(across(x), bottom + 16, f"{x:,.0f}", "middle")
        yield _text(left, _TOP - 12, f"CPU seconds of planning, over {name}", "start")
        for k, (curve, points) in enumerate(curves.items()):
            colour = _COLOURS[k % len(_COLOURS)]
            dash = ' stroke-dasharray="5 3"' if k >= len(_COLOURS) else ""
            at = [f"{across(x):.1f},{up(y):.1f}" for x, y in sorted(points)]
            yield (
                f'<polyline points="{" ".join(at)}" fill="none" stroke="{colour}"'
                f"{dash}><title>{escape(curve)}</title></polyline>"
            )
            for x, y in points:
                title = escape(f"{curve}: {x:,.0f} {name}, {y:.1f} CPU s")
                yield (
                    f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3"'
                    f' fill="{colour}"><title>{title}</title></circle>'
                )
            row, column = divmod(k, 2)
            x, y = left + column * width / 2, bottom + 32 + 12 * row
            yield _text(x, y, curve, "start", colour)

    return "".join(drawn())


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
        f' stroke="{colour}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )


SCALE: RowKind[TimedPlan] = RowKind(
    name="scale",
    sample=TimedPlan,
    measure=scale_row,
    describe=lambda found: (
        f"{found.total_s:.1f} CPU s, step {format_seconds(found.step_s)}"
    ),
    table=_table_lines,
    notes="Planned with nothing specified but the hardware, once each, in a process of"
    " its own; CPU seconds of all its threads, by pass (those of all meshes, stages and"
    f" variants together). The yardstick is what {ADDITIONS // 10**6} million additions"
    " in a Python loop took just before.",
    summary=_summary,
    plot=scale_plot,
    plot_title="CPU seconds of planning against devices and layers",
)
