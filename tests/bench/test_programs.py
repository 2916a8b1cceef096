from __future__ import annotations

from pathlib import Path

import pytest

from rhino_jax.bench import child as programs_module
from rhino_jax.bench.child import ProgramStore
from rhino_jax.verify.hlo.records import Compilation, MemoryUse, OutOfMemory


FITS = Compilation(
    platform="tpu",
    hlo_text="HloModule jit_step\n",
    memory=MemoryUse(
        argument_bytes=4, output_bytes=3, alias_bytes=2, temp_bytes=1, peak_bytes=6
    ),
    out_of_memory=None,
    messages="a word",
    seconds=1.5,
    parameter_axes=(frozenset({"x", "y"}), frozenset(), None),
)
REFUSED = Compilation(
    platform="tpu",
    hlo_text="",
    memory=None,
    out_of_memory=OutOfMemory(needed_bytes=9, available_bytes=None, message="HbmOom"),
    messages="",
    seconds=0.5,
)


@pytest.mark.parametrize("compilation", [FITS, REFUSED])
def test_programs_come_back_as_they_went(
    tmp_path: Path, compilation: Compilation
) -> None:
    programs = ProgramStore(tmp_path)
    assert programs.get("0123") is None
    programs["0123"] = compilation
    assert programs.get("0123") == compilation
    assert programs.get("4567") is None


def test_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    programs = ProgramStore(tmp_path)
    programs["0123"] = FITS
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-9], whole[:40] + b"\0" + whole[41:], b""):
        file.write_bytes(damaged)
        assert programs.get("0123") is None


def test_another_compiler_makes_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = ProgramStore(tmp_path)
    programs["0123"] = FITS
    other = programs_module.compiler_versions() | {"jaxlib": "0.0.1"}
    monkeypatch.setattr(programs_module, "compiler_versions", lambda: other)
    assert programs.get("0123") is None
