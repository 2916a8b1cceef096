"""Plan a row, or compile one of its cells, in a process of its own (`process`).

A crash, a kill or a timeout here is one result of the benchmark, and not its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from rhino_jax.bench.compiling import Compiler, ProgramStore
from rhino_jax.bench.methods import parse_method
from rhino_jax.bench.planning import Planner, trace_workload, workload_of
from rhino_jax.bench.records import CellOutcome, cell_key
from rhino_jax.bench.rows.kinds import ROW_KINDS
from rhino_jax.bench.store import Store
from rhino_jax.bench.suite import BenchRow
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.files import load_target
from rhino_jax.plan.files.store import load_plan, save_plan


def run_task(job: Mapping[str, Any]) -> Any:
    """Do a job, and return its result; runs in a worker."""
    _emulate(job["row"])
    return _TASKS[job["task"]](job, job["row"])


def _emulate(row: BenchRow) -> None:
    """Emulate as many CPU devices as the row's target has, before JAX starts them."""
    target = load_target(row.target)
    if "cpu" in target.device.kinds:
        jax.config.update("jax_num_cpu_devices", target.num_devices)


def _plan(job: Mapping[str, Any], row: BenchRow) -> dict[str, Any]:
    """Save each plan as soon as it is made."""
    store = Store(Path(job["folder"]))
    for planned in Planner.of(row).plans(row.methods):
        key = cell_key(row, planned.method)
        if planned.plan is not None:
            save_plan(planned.plan, store.plan_file(key))
        store.save(f"{key}-plan", planned.outcome(), job["versions"])
    return {}


def _compile(job: Mapping[str, Any], row: BenchRow) -> CellOutcome:
    """Compile a saved plan."""
    compiler = _compiler(job, row, trace_workload(workload_of(row)))
    return compiler.compile(load_plan(job["plan"]), job["planned"])


def _refine(job: Mapping[str, Any], row: BenchRow) -> CellOutcome:
    """Plan, compile the candidates, and choose the fastest compiled one."""
    planner = Planner.of(row)
    compiler = _compiler(job, row, planner.traced)
    planned = planner.refined(parse_method(job["method"]), compiler.judge)
    # Programs that other cells compiled before are cached here; a user would wait for
    # their compilation, so its seconds are added.
    plan_s = planned.plan_s + compiler.cached_s
    outcome = replace(planned, plan_s=plan_s).outcome()
    if planned.plan is not None:
        outcome = compiler.compile(planned.plan, outcome)
    return outcome


def _compiler(job: Mapping[str, Any], row: BenchRow, traced: Traced) -> Compiler:
    return Compiler(traced, row.target, ProgramStore(Path(job["cache"])))


_TASKS: Mapping[str, Callable[[Mapping[str, Any], BenchRow], Any]] = {
    "plan": _plan,
    "compile": _compile,
    "refine": _refine,
    "measure": lambda job, row: ROW_KINDS[job["kind"]].measure(row),
}
