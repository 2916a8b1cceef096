"""Report of a suite of large clusters and deep models: CPU seconds of planning with
nothing specified, by pass, against devices and layers."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import rhino_jax as rhino
from rhino_jax.bench.planning import trace_workload, workload_of
from rhino_jax.bench.rows.row_run import (
    ADDITIONS,
    Cells,
    Found,
    Results,
    RowKind,
    the_only,
    yardstick_s,
)
from rhino_jax.bench.suite import BenchRow, model_of
from rhino_jax.hardware.files import load_target
from rhino_jax.planner.search.passes import PASSES, measured_passes
from rhino_jax.units import format_seconds, format_share


ALLOWED_S = 30.0
"""CPU seconds that planning may take on any cluster, drawn as a line."""

TRACE, *_ = (p.name for p in PASSES)

_OTHER = "other"
_WIDTH, _HEIGHT, _LEFT, _TOP, _PANEL = 960, 480, 60, 30, 320
_COLOURS = ("#3366cc", "#dc3912", "#109618", "#990099", "#ff9900", "#0099c6", "#994499")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledPlan:
    """One plan of a row, with nothing specified but the hardware.

    Attributes:
      cpu_s: pass → CPU seconds, tracing included; `other` is all that is in no pass:
        passes of the program, stage cuts and schedules.
      step_s: predicted seconds of a step.
      gap: proved limit of its relative distance to the optimum on its mesh.
      mesh: mesh of all devices: axis → size.
      stages, micro_batches: their numbers.
      yardstick_s: CPU seconds of `yardstick`, measured before planning.
    """

    cpu_s: Mapping[str, float]
    step_s: float
    gap: float
    mesh: Mapping[str, int]
    stages: int
    micro_batches: int
    yardstick_s: float

    @property
    def total_s(self) -> float:
        """All CPU seconds."""
        return math.fsum(self.cpu_s.values())


def scale_row(row: BenchRow) -> ScaledPlan:
    """Plan a row with nothing specified but the hardware."""
    workload, beside_s = workload_of(row), yardstick_s()
    sharded = rhino.auto_shard(
        workload.step, hardware=row.target, donate_argnums=workload.donate_argnums
    )
    started = time.process_time()
    traced = trace_workload(workload)
    trace_s = time.process_time() - started
    with measured_passes() as spent:
        plan = sharded.plan_options.plan(traced, None)
    cpu_s = {TRACE: trace_s, **spent}
    cpu_s[_OTHER] = time.process_time() - started - sum(cpu_s.values())
    return ScaledPlan(
        cpu_s=cpu_s,
        step_s=plan.predicted.step_time_s,
        gap=plan.search.gap,
        mesh=dict(plan.mesh_axes),
        stages=max(1, len(plan.places)),
        micro_batches=plan.microbatches,
        yardstick_s=beside_s,
    )


def layers_of(row: BenchRow) -> int:
    """Return the number of layers or blocks of a row's model; 0: it has none."""
    config = model_of(row.model, **dict(row.overrides)).config
    named = {name: getattr(config, name) for name in config.__dataclass_fields__}
    found = [n for name, n in named.items() if name.endswith("_layers")]
    blocks = named.get("blocks", 0)
    levels = len(named.get("multipliers", (1,)))
    found += [levels * blocks] if isinstance(blocks, int) else blocks
    return sum(found)


def devices_of(row: BenchRow) -> int:
    """Return the number of devices of a row's target."""
    count = load_target(row.target).num_devices
    assert count is not None, "suites name whole topologies"
    return count


def _cells(row: BenchRow, found: ScaledPlan) -> Cells:
    passes = [*(p.name for p in PASSES), _OTHER]
    yield {
        "mesh": " × ".join(map(str, found.mesh.values())),
        "layers": str(layers_of(row)),
        "devices": f"{devices_of(row):,}",
        "stages": str(found.stages),
        "m": str(found.micro_batches),
        "step": format_seconds(found.step_s),
        "gap": format_share(found.gap),
        **{name: f"{found.cpu_s.get(name, 0.0):.1f}" for name in passes},
        "CPU s": f"{found.total_s:.1f}",
        "yardstick s": f"{found.yardstick_s:.2f}",
    }


def _summary(suite: str, found: Found[ScaledPlan]) -> tuple[str, ...]:
    """Return a line on the CPU seconds of all rows."""
    took = [plan.total_s for _, plan in found]
    slow, most_s = sum(s > ALLOWED_S for s in took), max(took)
    row, _ = found[took.index(most_s)]
    devices = max(devices_of(row) for row, _ in found)
    return (
        f"`{suite}`, {len(found)} plans of up to {devices:,} devices:"
        f" {min(took):.1f} to {most_s:.1f} CPU seconds"
        f" ({row.workload} on {row.target}), {slow} above {ALLOWED_S:.0f}.",
    )


def scale_plot(results: Results[ScaledPlan]) -> str:
    """Return an SVG: CPU seconds against devices, and against layers."""
    by_devices: dict[str, list[tuple[float, float]]] = defaultdict(list)
    by_layers: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for r in results:
        if r.found is None:
            continue
        kind, _, _ = r.row.target.partition(":")
        deep = {k for k, _ in r.row.overrides} & {"num_layers"}
        if deep:
            own = (layers_of(r.row), r.found.total_s)
            by_layers[f"{r.row.model}, {r.row.target}"].append(own)
        else:
            own = (devices_of(r.row), r.found.total_s)
            by_devices[f"{r.row.workload}, {kind}"].append(own)
    panels = [
        _panel(_LEFT, "devices", by_devices),
        _panel(_LEFT + _WIDTH // 2, "layers", by_layers),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="11">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
        f"{''.join(panels)}</svg>\n"
    )


def _panel(
    left: int, name: str, curves: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
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


SCALE: RowKind[ScaledPlan] = RowKind(
    name="scale",
    sample=ScaledPlan,
    measure=scale_row,
    read=the_only,
    line=lambda found: (
        f"{found.total_s:.1f} CPU s, step {format_seconds(found.step_s)}"
    ),
    cells=_cells,
    notes="Planned with nothing specified but the hardware, once each, in a process of"
    " its own; CPU seconds of all its threads, by pass (those of all meshes, stages and"
    f" variants together). The yardstick is what {ADDITIONS // 10**6} million additions"
    " in a Python loop took just before.",
    summary=_summary,
    plot=scale_plot,
    plot_title="CPU seconds of planning against devices and layers",
)
