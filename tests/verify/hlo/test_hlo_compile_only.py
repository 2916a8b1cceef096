"""The installed TPU and GPU compilers, on programs known in closed form."""

from __future__ import annotations

import pytest

from rhino_jax.verify.compile import compile_lowered
from tests.verify.extras import mesh_of_target
from tests.verify.hlo import hlo_programs as programs
from tests.verify.hlo.collectives_of import read_collectives
from tests.verify.hlo.test_hlo_compiled import (
    ROWS_BYTES,
    counts,
    halo,
    nested,
    one_of_each,
    ring,
    scanned,
)


pytestmark = pytest.mark.compile_only


def compiled(program: str, hardware: str, nx: int, ny: int):
    mesh = mesh_of_target(hardware, {"x": nx, "y": ny})
    lowered = programs.lower(getattr(programs, program), mesh)
    compilation = compile_lowered(lowered, mesh=mesh)
    assert compilation.out_of_memory is None
    return read_collectives(compilation.hlo_text, (("x", nx), ("y", ny)))


@pytest.mark.parametrize("expected", [one_of_each, scanned, nested, ring, halo])
@pytest.mark.parametrize(
    ("hardware", "nx", "ny"), [("v5e:4x4", 4, 4), ("v5p:2x2x2", 2, 4), ("h100:8", 2, 4)]
)
def test_traffic_is_what_the_program_says(
    expected, hardware: str, nx: int, ny: int
) -> None:
    found = compiled(expected.__name__, hardware, nx, ny)
    assert counts(found) == expected(nx, ny)


@pytest.mark.parametrize(
    ("program", "kind"),
    [("gather_rows", "all-gather"), ("scatter_rows", "reduce-scatter")],
)
def test_v5e_cuts_large_products_into_permutes(program: str, kind: str) -> None:
    (found,) = compiled(program, "v5e:2x4", 1, 8)
    assert (found.kind, found.axes, found.count) == (kind, ("y",), 1)
    assert found.bytes == 9 * ROWS_BYTES // 8
    assert "windowed loop of 9 permutes" in found.reason
