"""Report of a suite that only plans: seconds, gaps, memory of planning."""

from __future__ import annotations

import resource
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.planning import Planner
from rhino_jax.bench.progress import title_of
from rhino_jax.bench.rows.row_run import (
    ADDITIONS,
    Cells,
    Found,
    RowKind,
    yardstick_s,
)
from rhino_jax.bench.suite import BenchRow
from rhino_jax.plan.records import SearchReport
from rhino_jax.units import format_bytes, format_seconds, format_share


SAMPLES = 3
"""Number of processes that plan each row, each without caches; medians are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Planning times of one row by each of its methods.

    Attributes:
      num_ops: number of ops of the program, regions counted once.
      mesh: mesh of the last method's plan: axis → size.
      num_nodes: choices of the search problem, before and after folding and reduction.
      plan_s: method → median seconds, tracing excluded.
      step_s: method → predicted seconds of a step.
      gap: method → proved limit of its relative distance to the optimum.
      peak_bytes: peak memory of a process, JAX and the trace included.
      yardstick_s: median seconds of `yardstick`, measured before planning.
    """

    num_ops: int
    mesh: Mapping[str, int]
    num_nodes: tuple[int, int]
    plan_s: Mapping[str, float]
    step_s: Mapping[str, float]
    gap: Mapping[str, float]
    peak_bytes: int
    yardstick_s: float


def time_row(row: BenchRow) -> Timed:
    """Plan a row by each of its methods.

    Raises:
      BenchError: a method has no plan.
    """
    planner, beside_s = Planner.of(row), yardstick_s()
    plan_s: dict[str, float] = {}
    searches: dict[str, SearchReport] = {}
    for planned in planner.plans(row.methods):
        if planned.plan is None:
            why, _, _ = planned.error.partition("\n")
            raise BenchError(
                f"`bench`: {planned.method.name} gives no plan to take the time of.",
                where=title_of(row),
                numbers=why,
                fix="leave the method out, or change the row's mesh, target or"
                " overrides.",
            )
        plan_s[planned.method.name] = planned.plan_s
        searches[planned.method.name] = planned.plan.search
        mesh = dict(planned.plan.mesh_axes)
    # `ru_maxrss` is in kilobytes on Linux, in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Timed(
        num_ops=len(planner.traced.program.ops),
        mesh=mesh,
        num_nodes=list(searches.values())[-1].nodes,
        plan_s=plan_s,
        step_s={name: search.objective_s for name, search in searches.items()},
        gap={name: search.gap for name, search in searches.items()},
        peak_bytes=unit * peak,
        yardstick_s=beside_s,
    )


def _read(samples: Sequence[Timed]) -> Timed:
    """Return the medians of seconds, and the most memory."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, plan_s in sample.plan_s.items():
            seconds[name].append(plan_s)
    return replace(
        samples[-1],
        plan_s={name: statistics.median(found) for name, found in seconds.items()},
        step_s={k: x for sample in samples for k, x in sample.step_s.items()},
        gap={k: x for sample in samples for k, x in sample.gap.items()},
        peak_bytes=max(s.peak_bytes for s in samples),
        yardstick_s=statistics.median(s.yardstick_s for s in samples),
    )


def _cells(row: BenchRow, found: Timed) -> Cells:
    names = [m.name for m in row.methods]
    last, steps = names[-1], found.step_s
    mesh = " × ".join(map(str, found.mesh.values()))
    whole, left = found.num_nodes
    yield {
        "mesh": mesh if row.mesh else f"{mesh} (chosen)",
        "ops": f"{found.num_ops:,}",
        "nodes": f"{whole:,}",
        "left": f"{left:,}",
        **{f"{n} s": f"{s:.3g}" for n, s in found.plan_s.items()},
        **{f"{n} gap": f"{gap:.1%}" for n, gap in found.gap.items()},
        **{
            f"{n} ÷ {last}": f"{steps[n] / steps[last]:.3f}"
            for n in names[:-1]
            if n in steps and steps.get(last)
        },
        "held": format_bytes(found.peak_bytes),
        "yardstick s": f"{found.yardstick_s:.2f}",
    }


def _summary(suite: str, found: Found[Timed]) -> tuple[str, ...]:
    """Return a line on seconds, gaps and memory of planning."""
    parts = []
    for name in dict.fromkeys(name for _, timed in found for name in timed.plan_s):
        seconds = sorted(t.plan_s[name] for _, t in found if name in t.plan_s)
        gaps = [t.gap[name] for _, t in found if name in t.gap]
        parts.append(
            f"`{name}` {format_seconds(seconds[0])} to {format_seconds(seconds[-1])},"
            f" gap at most {format_share(max(gaps))}"
        )
    ops = max(t.num_ops for _, t in found)
    held = format_bytes(max(t.peak_bytes for _, t in found))
    return (
        f"`{suite}`, {len(found)} programs of up to {ops:,} ops, planned in:"
        f" {'; '.join(parts)}. At most {held} of memory.",
    )


PLAN: RowKind[Timed] = RowKind(
    name="plan",
    sample=Timed,
    measure=time_row,
    read=_read,
    line=lambda found: ", ".join(
        f"{name} {format_seconds(s)}" for name, s in found.plan_s.items()
    ),
    cells=_cells,
    notes=f"Seconds of planning, tracing excluded: medians of {SAMPLES} processes. The"
    " gap is how far the predicted step may be above the best of plans that treat"
    " repeated layers alike, proved by a lower bound. `nodes` choose in the whole"
    " program, `left` in the folded and reduced problem. The ratio is of predicted"
    " steps; `held` is the most memory of a process, with JAX and the trace. The"
    f" yardstick is what {ADDITIONS // 10**6} million additions in a Python loop took"
    " beside it, on this machine.",
    summary=_summary,
    samples=SAMPLES,
    is_by_method=True,
)
