"""Compile a row's plans, cache the programs, and measure them.

Programs are cached by the hash of the program before compiling: two plans may be one.

Compiling is nearly all of a benchmark's time. A compiled program depends on the
program, the compiler and the options, and not on the planner: when an edited planner
produces the same plan, the program is not compiled again. Its measures are always read
again.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from rhino_jax.bench.records import CellOutcome, Measure
from rhino_jax.bench.versions import compiler_versions
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.files import load_target
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
        compiled = compile_plan(self.traced, plan, place, self.target, self.programs)
        if compiled.is_cached:
            self.cached_s += compiled.compilation.seconds
        return compiled
