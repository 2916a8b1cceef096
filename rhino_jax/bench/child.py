"""Plan a row, or compile one of its cells, in a process of its own (`process`).

A crash, a kill or a timeout here is one result of the benchmark, and not its end.

Compiled programs are cached by the hash of the program before compiling: two plans may
be one. Compiling is nearly all of the time of a benchmark. A compiled program depends
on the program, the compiler and the options, and not on the planner: when an edited
planner produces the same plan, the program is not compiled again. Its measures are
always read again.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from rhino_jax.bench.methods import parse_method
from rhino_jax.bench.planning import Planner, trace_workload, workload_of
from rhino_jax.bench.records import CellOutcome, Measure, cell_key
from rhino_jax.bench.rows import ROW_KINDS
from rhino_jax.bench.store import Store
from rhino_jax.bench.suite import BenchRow
from rhino_jax.bench.versions import compiler_versions
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.files import load_target
from rhino_jax.plan.files.store import load_plan, save_plan
from rhino_jax.plan.plan import PlanData
from rhino_jax.units import format_bytes
from rhino_jax.utils.atomic_write import write_file
from rhino_jax.utils.codec import from_json, to_json
from rhino_jax.verify.hlo.records import Compilation, Reading
from rhino_jax.verify.places import place_of
from rhino_jax.verify.refine import PlanProgram, compile_plan


@dataclass(frozen=True, slots=True)
class ProgramStore:
    """A folder of compiled programs.

    Attributes:
      folder: the folder.
    """

    folder: Path

    def get(self, program: str) -> Compilation | None:
        """Return a program compiled with these compilers; None if not cached."""
        try:
            text = gzip.decompress(self._file(program).read_bytes())
            values = json.loads(text)
        except (OSError, EOFError, ValueError, zlib.error):
            return None
        if values["versions"] != compiler_versions():
            return None
        return from_json(Compilation, values["compilation"])

    def __setitem__(self, program: str, compilation: Compilation) -> None:
        """Save a compiled program atomically."""
        values = {"versions": compiler_versions(), "compilation": compilation}
        packed = gzip.compress(json.dumps(to_json(values)).encode())
        write_file("`bench`", self._file(program), packed)

    def _file(self, program: str) -> Path:
        return self.folder / f"{program}.json.gz"


@dataclass(slots=True, eq=False)
class Compiler:
    """Compiler of one traced workload's plans for one target.

    Attributes:
      traced: the workload's step.
      target: hardware with its topology, as "v5e:4x4".
      programs: cache of compiled programs.
      cached_s: seconds that cached programs took to compile.
    """

    traced: Traced
    target: str
    programs: ProgramStore
    cached_s: float = 0.0

    def judge(self, plan: PlanData) -> Reading:
        """Compile a plan and return its reading for `rhino_jax.verify.refine`."""
        return self._compile(plan).reading

    def compile(self, plan: PlanData, planned: CellOutcome) -> CellOutcome:
        """Compile a plan and return its outcome, extended by the compiled program."""
        compiled = self._compile(plan)
        compilation, reading = compiled.compilation, compiled.reading
        out, hbm_bytes = (
            compilation.out_of_memory,
            load_target(self.target).device.hbm_bytes,
        )
        peak_bytes = reading.compiled.peak_bytes
        if out is not None:
            measure, error = Measure(peak_bytes=out.needed_bytes), out.message
        else:
            measure, error = Measure.of(reading.compiled, reading.collectives), ""
            if peak_bytes > hbm_bytes:
                error = (
                    f"it holds {format_bytes(peak_bytes)}, a device has"
                    f" {format_bytes(hbm_bytes)}."
                )
        return replace(
            planned,
            program=compiled.program,
            status="out of memory" if error else "ok",
            compiled=measure,
            rematerialised=len(reading.rematerialised),
            compile_s=compilation.seconds,
            rates=reading.rates,
            error=error,
            notes=reading.notes,
        )

    def _compile(self, plan: PlanData) -> PlanProgram:
        place = place_of(plan, self.target, "`bench`")
        compiled = compile_plan(self.traced, plan, place, self.programs)
        if compiled.is_cached:
            self.cached_s += compiled.compilation.seconds
        return compiled


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
