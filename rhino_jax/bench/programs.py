"""Compiled programs that are kept, by the hash of what they were compiled from.

Compiling is nearly all of a benchmark's time. What a compiler makes of a program
depends on the program, the compiler and the options, and on no planner: an edited
planner whose plan comes out the same need not wait for it again, and what is read of
the program is always read anew.
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
      folder: where they are.
    """

    folder: Path

    def read(self, program: str) -> Compilation | None:
        """The compiled program, or None where these compilers have not made it."""
        try:
            text = gzip.decompress(self._file(program).read_bytes())
            values = json.loads(text)
        except (OSError, EOFError, ValueError, zlib.error):
            return None
        if values["versions"] != compiler_versions():
            return None
        return _compilation(values["compilation"])

    def write(self, program: str, compilation: Compilation) -> None:
        """Keep a compiled program; its file appears whole or not at all."""
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
