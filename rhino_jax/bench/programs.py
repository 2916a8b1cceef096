"""Cache of compiled programs, by the hash of the program before compiling.

Compiling is nearly all of a benchmark's time. A compiled program depends on the
program, the compiler and the options, and not on the planner: when an edited planner
produces the same plan, the program is not compiled again. Its measures are always read
again.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rhino_jax.bench.store import whole_file
from rhino_jax.bench.versions import compiler_versions
from rhino_jax.verify.hlo.records import Compilation, MemoryUse, OutOfMemory


@dataclass(frozen=True, slots=True)
class ProgramStore:
    """A folder of compiled programs.

    Attributes:
      folder: the folder.
    """

    folder: Path

    def read(self, program: str) -> Compilation | None:
        """Return a program compiled with these compilers; None if not cached."""
        try:
            text = gzip.decompress(self._file(program).read_bytes())
            values = json.loads(text)
        except (OSError, EOFError, ValueError, zlib.error):
            return None
        if values["versions"] != compiler_versions():
            return None
        return _compilation(values["compilation"])

    def write(self, program: str, compilation: Compilation) -> None:
        """Save a compiled program atomically."""
        axes = [None if x is None else sorted(x) for x in compilation.parameter_axes]
        found = {**asdict(compilation), "parameter_axes": axes}
        values = {"versions": compiler_versions(), "compilation": found}
        packed = gzip.compress(json.dumps(values).encode())
        with whole_file(self._file(program)) as file:
            file.write_bytes(packed)

    def _file(self, program: str) -> Path:
        return self.folder / f"{program}.json.gz"


def _compilation(values: dict[str, Any]) -> Compilation:
    memory, out = values["memory"], values["out_of_memory"]
    values["memory"] = memory and MemoryUse(**memory)
    values["out_of_memory"] = out and OutOfMemory(**out)
    axes = values.get("parameter_axes", ())
    values["parameter_axes"] = tuple(None if x is None else frozenset(x) for x in axes)
    return Compilation(**values)
