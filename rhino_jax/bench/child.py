"""Child process that plans a row, or compiles one of its cells.

    python -m rhino_jax.bench.child JOB.json

A job file specifies the task and the output; a crash, a kill or a timeout here is one
result of the benchmark, and not its end.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from rhino_jax.bench.compiling import Compiler, ProgramStore
from rhino_jax.bench.methods import parse_method
from rhino_jax.bench.planned import PlanEntry, add_entry
from rhino_jax.bench.planning import Planner, trace_workload, workload_of
from rhino_jax.bench.rows.calls import call_row
from rhino_jax.bench.rows.clock import clock_row
from rhino_jax.bench.rows.pipeline_run import plan_pipeline
from rhino_jax.bench.rows.plan_run import time_row
from rhino_jax.bench.rows.scale_run import scale_row
from rhino_jax.bench.stages.run import run_stages
from rhino_jax.bench.store import write_json
from rhino_jax.bench.suite import BenchRow, parse_suite
from rhino_jax.errors import RhinoError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.files import load_target
from rhino_jax.plan.files.store import load_plan
from rhino_jax.plan.records import CompiledCandidate
from rhino_jax.utils.stderr import keep_captured


def main(path: str) -> int:
    """Run the job that a file describes.

    Returns:
      2 for an error that rhino raises itself, printed in four parts; else 0.
    """
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    keep_captured(Path(path).with_suffix(".stderr"))
    (row,) = parse_suite({"rows": [job["row"]]}, name="job", file=path).rows
    _emulate(row)
    try:
        _TASKS[job["task"]](job, row)
    except RhinoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _emulate(row: BenchRow) -> None:
    """Emulate as many CPU devices as the row's target has, before JAX starts them."""
    target = load_target(row.target)
    if "cpu" in target.device.kinds:
        jax.config.update("jax_num_cpu_devices", target.num_devices)


def _plan(job: Mapping[str, Any], row: BenchRow) -> None:
    """Save each plan as soon as it is made."""
    for planned in Planner.of(row).plans(row.methods):
        add_entry(Path(job["folder"]), job["versions"], planned)


def _compile(job: Mapping[str, Any], row: BenchRow) -> None:
    """Compile a saved plan."""
    compiler = _compiler(job, row, trace_workload(workload_of(row)))
    compiled = compiler.compile(load_plan(job["plan"]))
    write_json(Path(job["result"]), {"compiled": compiled})


def _refine(job: Mapping[str, Any], row: BenchRow) -> None:
    """Plan, compile the candidates, and choose the fastest compiled one."""
    planner = Planner.of(row)
    compiler = _compiler(job, row, planner.traced)
    planned = planner.refined(parse_method(job["method"]), compiler.judge)
    # Programs that other cells compiled before are cached here; a user would wait for
    # their compilation, so its seconds are added.
    plan_s = planned.plan_s - compiler.waited_s + compiler.charged_s
    entry = PlanEntry.of(replace(planned, plan_s=plan_s), "")
    found: dict[str, Any] = {"planned": entry}
    if planned.plan is not None:
        found["compiled"] = compiler.compile(planned.plan)
        found["candidates"] = [_candidate(c) for c in planned.plan.refined]
    write_json(Path(job["result"]), found)


def _candidate(candidate: CompiledCandidate) -> dict[str, Any]:
    """Return a candidate as JSON, with None for an infinite time (refused)."""
    values = asdict(candidate)
    if not math.isfinite(candidate.compiled_s):
        values["compiled_s"] = None
    return values


def _clock(job: Mapping[str, Any], row: BenchRow) -> None:
    """Run every method's step on emulated devices, and time it."""
    write_json(Path(job["result"]), clock_row(row))


def _time(job: Mapping[str, Any], row: BenchRow) -> None:
    """Plan by every method, and time it."""
    write_json(Path(job["result"]), time_row(row))


def _pipelines(job: Mapping[str, Any], row: BenchRow) -> None:
    """Plan a pipeline, and time it."""
    write_json(Path(job["result"]), plan_pipeline(row))


def _scale(job: Mapping[str, Any], row: BenchRow) -> None:
    """Plan with nothing specified, and time every pass."""
    write_json(Path(job["result"]), scale_row(row))


def _stages(job: Mapping[str, Any], row: BenchRow) -> None:
    """Run a pipeline by every schedule, in one process and in several."""
    write_json(Path(job["result"]), run_stages(row, Path(job["result"])))


def _calls(job: Mapping[str, Any], row: BenchRow) -> None:
    """Call a step once under `jit` and once under `auto_shard`."""
    write_json(Path(job["result"]), call_row(row))


def _compiler(job: Mapping[str, Any], row: BenchRow, traced: Traced) -> Compiler:
    return Compiler(traced, row.target, ProgramStore(Path(job["cache"])))


_TASKS = {
    "plan": _plan,
    "compile": _compile,
    "refine": _refine,
    "clock": _clock,
    "time": _time,
    "pipelines": _pipelines,
    "scale": _scale,
    "stages": _stages,
    "calls": _calls,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
