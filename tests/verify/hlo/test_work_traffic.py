"""Bytes that fusions and single instructions touch."""

from __future__ import annotations

from pathlib import Path

import pytest

from rhino_jax.verify.hlo.module import parse_module
from rhino_jax.verify.hlo.work import InstructionWork, WorkReader


HLO = Path(__file__).parent


def _weight(work: InstructionWork) -> float:
    return float(work.flops + work.bytes)


def _bytes(fused: str, *types: str, result: str) -> int:
    """Bytes of a fusion over parameters p0, p1 … of these types."""
    inner = "\n".join(
        f"  %p{i} = {kind} parameter({i})" for i, kind in enumerate(types)
    )
    outer = inner.replace("%p", "%a")
    names = ", ".join(f"%a{i}" for i in range(len(types)))
    text = f"""HloModule m, is_scheduled=true
%fused (p: f32[]) -> {result} {{
{inner}
{fused}
}}

ENTRY %main (a: f32[]) -> {result} {{
{outer}
  ROOT %r = {result} fusion({names}), kind=kLoop, calls=%fused
}}
"""
    (work,) = WorkReader(parse_module(text), _weight).program().items
    return work.bytes


BIG, SLICE, INDEX = "f32[64,32]{1,0}", "f32[1,32]{1,0}", "s32[]"
BIG_BYTES, ROW_BYTES, INDEX_BYTES = 64 * 32 * 4, 32 * 4, 4


def test_an_elementwise_fusion_reads_and_writes_all() -> None:
    found = _bytes(
        "  %c = bf16[64,32]{1,0} convert(%p0)\n"
        "  ROOT %s = bf16[64,32]{1,0} multiply(%c, %c)",
        BIG,
        result="bf16[64,32]{1,0}",
    )
    assert found == BIG_BYTES + BIG_BYTES // 2


@pytest.mark.parametrize("between", ["", "negate", "copy", "bitcast"])
def test_a_slice_reads_what_it_takes(between: str) -> None:
    lines = f"  %n = {BIG} {between}(%p0)\n" if between else ""
    source = "%n" if between else "%p0"
    found = _bytes(
        f"{lines}  %zero = s32[] constant(0)\n"
        f"  %d = {SLICE} dynamic-slice({source}, %p1, %zero)\n"
        f"  ROOT %r = {SLICE} exponential(%d)",
        BIG,
        INDEX,
        result=SLICE,
    )
    assert found == 2 * ROW_BYTES + INDEX_BYTES


@pytest.mark.parametrize(
    "between",
    [
        "pad(%p0, %zero), padding=0_64x0_0",
        "concatenate(%p0, %p0), dimensions={0}",
        "broadcast(%p0), dimensions={0,1}",
    ],
)
def test_a_slice_of_what_a_fusion_lengthens_reads_its_share(between: str) -> None:
    """XLA:GPU computes only the elements of the result, however long the chain of pads
    and slices before them: a scan by halves prices tens of times too long otherwise."""
    found = _bytes(
        "  %zero = f32[] constant(0)\n"
        f"  %w = f32[128,32]{{1,0}} {between}\n"
        "  %n = f32[128,32]{1,0} negate(%w)\n"
        "  %d = f32[2,32]{1,0} slice(%n), slice={[0:2], [0:32]}\n"
        f"  ROOT %r = {SLICE} slice(%d), slice={{[1:2], [0:32]}}",
        BIG,
        result=SLICE,
    )
    assert found <= 3 * ROW_BYTES


def test_a_value_that_is_used_whole_besides_is_read_whole() -> None:
    found = _bytes(
        f"  %d = {SLICE} slice(%p0), slice={{[0:1], [0:32]}}\n"
        "  %zero = f32[] constant(0)\n"
        "  %m = f32[32]{0} reduce(%p0, %zero), dimensions={0}, to_apply=%add\n"
        f"  ROOT %t = ({SLICE}, f32[32]{{0}}) tuple(%d, %m)",
        BIG,
        result=f"({SLICE}, f32[32]{{0}})",
    )
    assert found == BIG_BYTES + 2 * ROW_BYTES


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_update_in_place_touches_the_update(wrapped: bool) -> None:
    root = "" if wrapped else "ROOT "
    tail = "  ROOT %b = f32[2048]{0} bitcast(%u)" if wrapped else ""
    found = _bytes(
        f"  %e = {SLICE} exponential(%p1)\n  %zero = s32[] constant(0)\n"
        f"  {root}%u = {BIG} dynamic-update-slice(%p0, %e, %p2, %zero)\n{tail}",
        BIG,
        SLICE,
        INDEX,
        result="f32[2048]{0}" if wrapped else BIG,
    )
    assert found == 2 * ROW_BYTES + INDEX_BYTES


def test_an_update_that_is_converted_is_not_in_place() -> None:
    half = "bf16[64,32]{1,0}"
    found = _bytes(
        f"  %c = {BIG} convert(%p0)\n  %zero = s32[] constant(0)\n"
        f"  %u = {BIG} dynamic-update-slice(%c, %p1, %p2, %zero)\n"
        f"  ROOT %r = {half} convert(%u)",
        half,
        SLICE,
        INDEX,
        result=half,
    )
    assert found == 2 * BIG_BYTES // 2 + ROW_BYTES + INDEX_BYTES


def test_a_gather_reads_rows_and_a_scatter_updates_them() -> None:
    rows, ids = "f32[5,32]{1,0}", "s32[5,1]{1,0}"
    gathered = _bytes(
        f"  ROOT %g = {rows} gather(%p0, %p1), offset_dims={{1}}",
        BIG,
        ids,
        result=rows,
    )
    assert gathered == 2 * 5 * ROW_BYTES + 5 * INDEX_BYTES
    scattered = _bytes(
        f"  ROOT %s = {BIG} scatter(%p0, %p1, %p2), to_apply=%add",
        BIG,
        ids,
        rows,
        result=BIG,
    )
    # The rows are read to be added to, the updates are read, the rows are written.
    assert scattered == 3 * 5 * ROW_BYTES + 5 * INDEX_BYTES


@pytest.mark.parametrize(
    ("layout", "read"),
    [
        ("{1,0:T(8,128)}", 5 * ROW_BYTES),
        # On the lanes: each row of 32 is in four tiles.
        ("{0,1:T(8,128)}", 5 * 4 * 4096),
    ],
)
def test_a_look_up_of_rows_on_lanes_reads_their_tiles(layout: str, read: int) -> None:
    rows = "f32[5,32]{1,0}"
    found = _bytes(
        f"  ROOT %g = {rows} gather(%p0, %p1), offset_dims={{1}}, slice_sizes={{1,32}}",
        f"f32[4096,32]{layout}",
        "s32[5,1]{1,0}",
        result=rows,
    )
    assert found == read + 5 * ROW_BYTES + 5 * INDEX_BYTES


NESTED = f"""HloModule m, is_scheduled=true
%zeros (q: f32[]) -> {BIG} {{
  %q = f32[] parameter(0)
  ROOT %b = {BIG} broadcast(%q), dimensions={{}}
}}

%update (a: {BIG}, i: s32[5], u: f32[5,32]) -> {BIG} {{
  %a = {BIG} parameter(0)
  %i = s32[5] parameter(1)
  %u = f32[5,32]{{1,0}} parameter(2)
  ROOT %s = {BIG} scatter(%a, %i, %u), to_apply=%add
}}

%fused (a: TYPE, i: s32[5], u: f32[5,32]) -> {BIG} {{
  %a = TYPE parameter(0)
  %i = s32[5] parameter(1)
  %u = f32[5,32]{{1,0}} parameter(2)
  %f = {BIG} MADE
  ROOT %s = {BIG} fusion(%f, %i, %u), kind=kCustom, calls=%update
}}

ENTRY %main (a: TYPE, i: s32[5], u: f32[5,32]) -> {BIG} {{
  %a = TYPE parameter(0)
  %i = s32[5] parameter(1)
  %u = f32[5,32]{{1,0}} parameter(2)
  ROOT %r = {BIG} fusion(%a, %i, %u), kind=kCustom, calls=%fused
}}
"""


@pytest.mark.parametrize(
    ("made", "kind", "updated"),
    [
        ("fusion(%a), kind=kLoop, calls=%zeros", "f32[]", 4 + BIG_BYTES),
        ("bitcast(%a)", BIG, 2 * 5 * ROW_BYTES),
    ],
)
def test_a_scatter_into_zeros_of_its_own_kernel_writes_all(
    made: str, kind: str, updated: int
) -> None:
    text = NESTED.replace("TYPE", kind).replace("MADE", made)
    (work,) = WorkReader(parse_module(text), _weight).program().items
    assert work.bytes == updated + 5 * ROW_BYTES + 5 * INDEX_BYTES


def test_fusions_within_fusions() -> None:
    text = f"""HloModule m, is_scheduled=true
%inner (p: f32[]) -> {SLICE} {{
  %p0 = {BIG} parameter(0)
  ROOT %d = {SLICE} slice(%p0), slice={{[0:1], [0:32]}}
}}

%outer (p: f32[]) -> {SLICE} {{
  %p0 = {BIG} parameter(0)
  %f = {SLICE} fusion(%p0), kind=kLoop, calls=%inner
  ROOT %n = {SLICE} negate(%f)
}}

ENTRY %main (a: f32[]) -> {SLICE} {{
  %a = {BIG} parameter(0)
  ROOT %r = {SLICE} fusion(%a), kind=kLoop, calls=%outer
}}
"""
    (work,) = WorkReader(parse_module(text), _weight).program().items
    assert work.bytes == 2 * ROW_BYTES


def test_a_long_chain_of_ops_in_a_fusion() -> None:
    steps = 3000
    lines = ["  %n0 = f32[64,32]{1,0} negate(%p0)"]
    lines += [f"  %n{i} = f32[64,32]{{1,0}} negate(%n{i - 1})" for i in range(1, steps)]
    lines.append(f"  ROOT %r = {SLICE} slice(%n{steps - 1}), slice={{[0:1], [0:32]}}")
    assert _bytes("\n".join(lines), BIG, result=SLICE) == 2 * ROW_BYTES


def test_a_cache_that_is_updated_in_a_loop() -> None:
    module = parse_module((HLO / "work_gpu_cache.hlo").read_text())
    by_name = {w.name: w for w in WorkReader(module, _weight).program().items}
    update = by_name["loop_dynamic_update_slice_fusion"]
    # One row of 512 for each of 4 sequences, read and written, and two offsets: not
    # the 4 MiB of the cache.
    assert (update.count, update.bytes) == (512, 2 * 4 * 512 * 4 + 8)
