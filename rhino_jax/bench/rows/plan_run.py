"""Report of a suite that only plans: seconds, gaps, memory of planning."""

from __future__ import annotations

import resource
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.bench.errors import BenchError
from rhino_jax.bench.planning import Planner
from rhino_jax.bench.progress import title_of
from rhino_jax.bench.rows.row_run import (
    ADDITIONS,
    RowResult,
    RowTask,
    table_of_rows,
    yardstick_s,
)
from rhino_jax.bench.suite import BenchRow, Suite
from rhino_jax.units import format_bytes, format_seconds


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


def plan_task() -> RowTask[Timed]:
    """Return the task that plans every method of a row several times.

    Each sample runs in a separate process, so that none profits from another's caches.
    """
    return RowTask(
        name="time", samples=SAMPLES, is_by_method=True, read=_read, line=_line
    )


def time_row(row: BenchRow) -> dict[str, Any]:
    """Plan a row by each of its methods; return the result as JSON.

    Raises:
      BenchError: a method has no plan.
    """
    planner = Planner.of(row)
    methods: dict[str, Any] = {}
    found: dict[str, Any] = {
        "num_ops": len(planner.traced.program.ops),
        "yardstick_s": yardstick_s(),
    }
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
        search = planned.plan.search
        found["mesh"] = dict(planned.plan.mesh_axes)
        found["num_nodes"] = search.nodes
        methods[planned.method.name] = {
            "plan_s": planned.plan_s,
            "step_s": search.objective_s,
            "gap": search.gap,
        }
    # `ru_maxrss` is in kilobytes on Linux, in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found | {"methods": methods, "peak_bytes": unit * peak}


def _read(samples: Sequence[Mapping[str, Any]]) -> Timed:
    last = samples[-1]
    by_method: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in samples:
        for name, values in sample["methods"].items():
            by_method[name].append(values)
    return Timed(
        num_ops=last["num_ops"],
        mesh=last["mesh"],
        num_nodes=tuple(last["num_nodes"]),
        plan_s={
            name: statistics.median(v["plan_s"] for v in values)
            for name, values in by_method.items()
        },
        step_s={name: values[0]["step_s"] for name, values in by_method.items()},
        gap={name: values[0]["gap"] for name, values in by_method.items()},
        peak_bytes=max(s["peak_bytes"] for s in samples),
        yardstick_s=statistics.median(s["yardstick_s"] for s in samples),
    )


def _line(found: Timed) -> str:
    seconds = found.plan_s.items()
    return ", ".join(f"{name} {format_seconds(s)}" for name, s in seconds)


def plan_report(suite: Suite, results: Sequence[RowResult[Timed]], command: str) -> str:
    """Return the times as Markdown, a line per row.

    Args:
      suite: the suite.
      results: results of all its rows.
      command: the command that repeats the run.
    """
    methods = list(dict.fromkeys(m.name for row in suite.rows for m in row.methods))
    header = ["workload", "target", "mesh", "ops", "nodes", "left"]
    header += [f"{name} s" for name in methods]
    header += [f"{name} gap" for name in methods]
    header += [f"{name} ÷ {methods[-1]}" for name in methods[:-1]]
    header += ["held", "yardstick s"]

    def cells(row: BenchRow, found: Timed) -> list[str]:
        mesh = " × ".join(map(str, found.mesh.values()))
        mesh += "" if row.mesh else " (chosen)"
        line = [row.workload, row.target, mesh, f"{found.num_ops:,}"]
        line += [f"{n:,}" for n in found.num_nodes]
        last = found.step_s.get(methods[-1])
        line += [_number(found.plan_s.get(name), "{:.3g}") for name in methods]
        line += [_number(found.gap.get(name), "{:.1%}") for name in methods]
        for name in methods[:-1]:
            step_s = found.step_s.get(name)
            ratio = None if step_s is None or not last else step_s / last
            line.append(_number(ratio, "{:.3f}"))
        return [*line, format_bytes(found.peak_bytes), f"{found.yardstick_s:.2f}"]

    parts = [
        *table_of_rows(suite, results, command, header, cells),
        f"Seconds of planning, tracing excluded: medians of {SAMPLES} processes. The"
        " gap is how far the predicted step may be above the best of plans that treat"
        " repeated layers alike, proved by a lower bound. `nodes` choose in the whole"
        " program, `left` in the folded and reduced problem. The ratio is of predicted"
        " steps; `held` is the most memory of a process, with JAX and the trace."
        f" The yardstick is what {ADDITIONS // 10**6} million additions in a Python"
        " loop took beside it, on this machine.",
    ]
    return "\n\n".join(parts) + "\n"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
