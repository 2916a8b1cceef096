"""Measure a row, or plan and compile its cells, in a process of its own (`process`).

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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax

from rhino_jax.bench.methods import ShardingMethod
from rhino_jax.bench.planning import Planner
from rhino_jax.bench.records import Measure, Result, cell_key, row_key
from rhino_jax.bench.rows import ROW_KINDS
from rhino_jax.bench.store import Store
from rhino_jax.bench.suite import BenchRow
from rhino_jax.bench.versions import compiler_versions
from rhino_jax.hardware.files import load_target
from rhino_jax.plan.files.store import save_plan
from rhino_jax.plan.plan import PlanData
from rhino_jax.units import format_bytes
from rhino_jax.utils.atomic_write import write_file
from rhino_jax.utils.codec import from_json, to_json
from rhino_jax.verify.hlo.records import Compilation
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
class RowCompiler:
    """Planner and compiler of one row's cells.

    Attributes:
      planner: planner of the row.
      row: the row.
      store: folder of the benchmark.
      cached_s: seconds that cached programs took to compile.
    """

    planner: Planner
    row: BenchRow
    store: Store
    cached_s: float = 0.0

    def result(self, method: ShardingMethod, made_with: Mapping[str, str]) -> Result:
        """Return the outcome of a method's plan, and of its compiled program.

        The plan and its outcome are saved before it is compiled.
        """
        if method.refine:
            self.cached_s = 0.0
            result, plan = self.planner.refined(
                method, lambda plan: self._compile(plan).reading
            )
            # A user would wait for the programs that other cells compiled before.
            plan_s = (result.plan_s or 0) + self.cached_s
            result = replace(result, plan_s=plan_s)
        else:
            result, plan = self.planner.plan(method)
        if plan is None:
            return result
        key = cell_key(self.row, method)
        save_plan(plan, self.store.plan_file(key))
        self.store.save(f"{key}-plan", result, made_with)
        return self._compiled(plan, result)

    def _compiled(self, plan: PlanData, planned: Result) -> Result:
        """Compile a plan and return its outcome, extended by the compiled program."""
        made = self._compile(plan)
        reading, out = made.reading, made.compilation.out_of_memory
        hbm_bytes = self.planner.target.device.hbm_bytes
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
            program=made.program,
            status="out of memory" if error else "ok",
            compiled=measure,
            rematerialised=len(reading.rematerialised),
            compile_s=made.compilation.seconds,
            rates=reading.rates,
            error=error,
            notes=reading.notes,
        )

    def _compile(self, plan: PlanData) -> PlanProgram:
        place = place_of(plan, self.row.target, "`bench`")
        programs = ProgramStore(self.store.folder / "compiled")
        made = compile_plan(self.planner.traced, plan, place, programs)
        if made.is_cached:
            self.cached_s += made.compilation.seconds
        return made


_compilers: dict[str, RowCompiler] = {}
"""The row of this process, by its key."""


def run_task(job: Mapping[str, Any]) -> Any:
    """Measure a row, or compile one of its cells; runs in a worker."""
    row: BenchRow = job["row"]
    _emulate(row.target)
    kind, key = ROW_KINDS.get(job["kind"]), row_key(row)
    if kind is not None:
        return kind.measure(row)
    if key not in _compilers:
        _compilers[key] = RowCompiler(Planner.of(row), row, Store(Path(job["folder"])))
    (method,) = row.methods
    return _compilers[key].result(method, job["versions"])


@cache
def _emulate(name: str) -> None:
    """Emulate as many CPU devices as a target has, once, before JAX starts them."""
    target = load_target(name)
    if "cpu" in target.device.kinds:
        jax.config.update("jax_num_cpu_devices", target.num_devices)
