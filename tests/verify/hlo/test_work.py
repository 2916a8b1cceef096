"""The walk over a program's control flow: trips, branches, cycles, what is left out."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from rhino_jax.verify.hlo.instruction_cost import Channels
from rhino_jax.verify.hlo.module import parse_module
from rhino_jax.verify.hlo.work import InstructionWork, ProgramWork, WorkReader


HLO = Path(__file__).parent


def _weight(work: InstructionWork) -> float:
    return float(work.flops + work.bytes)


def _read(text: str) -> ProgramWork:
    return WorkReader(parse_module(text), _weight).program()


def _recorded(name: str) -> ProgramWork:
    return _read((HLO / f"{name}.hlo").read_text())


def test_cycles_times_nested_trips() -> None:
    # In the file: 768 + 32 in the inner body, which runs 3 x 4 times, 6272 outside.
    work = _recorded("work_tpu_scans")
    assert work.cycles == 12 * (768 + 32) + 6272
    assert work.notes == ()


def test_what_has_no_cycles_on_tpu_is_still_work() -> None:
    work = {w.name: w for w in _recorded("work_tpu_embedding").items}
    gather = next(w for name, w in work.items() if name.startswith("gather"))
    scatter = next(w for name, w in work.items() if name.startswith("scatter"))
    assert (gather.cycles, scatter.cycles) == (None, None)
    # Rows and their indices, not the table.
    assert 128 * 512 * 4 < gather.bytes < 3 * 128 * 512 * 4
    assert 128 * 512 * 4 < scatter.bytes < 4 * 128 * 512 * 4


def test_collectives_are_not_work() -> None:
    work = _recorded("work_tpu_embedding")
    assert not [w for w in work.items if w.opcode.startswith("all-")]


LIBRARIES = """HloModule m, is_scheduled=true
%bits (p: u32[64]) -> u32[64] {
  %p0 = u32[64]{0} parameter(0)
  %a = u32[64]{0} xor(%p0, %p0)
  ROOT %r = u32[64]{0} add(%a, %p0)
}

ENTRY %main (k: u32[64]) -> u32[64] {
  %k = u32[64]{0} parameter(0)
  %a = f32[8,8]{1,0} parameter(1)
  %b = f32[8,2]{1,0} parameter(2)
  %x = bf16[2,4,4,6]{3,2,1,0} parameter(3)
  %w = bf16[12,3,3,2]{3,2,1,0} parameter(4)
  %sorted = (u32[64]{0}, u8[9]{0}) custom-call(%k), custom_call_target="xla.gpu.ext.cub_sort_keys"
  %freq = c64[8,5]{1,0} fft(%a), fft_type=RFFT, fft_length={8,8}
  %back = f32[8,8]{1,0} fft(%freq), fft_type=IRFFT, fft_length={8,8}
  %l = (f32[8,8]{0,1}, s32[]) custom-call(%a), custom_call_target="cusolver_potrf_ffi"
  %s = (f32[8,2]{0,1}, s8[0]{0}) custom-call(%a, %b), custom_call_target="__cublas$triangularSolve"
  %c = (bf16[2,4,4,12]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, feature_group_count=3, custom_call_target="__cudnn$convForward"
  ROOT %r = u32[64]{0} fusion(%k), kind=kLoop, calls=%bits
}
"""  # noqa: E501


def test_calls_of_libraries() -> None:
    work = {w.name: w for w in _read(LIBRARIES).items}
    assert _read(LIBRARIES).notes == ()
    libraries = {name: w.library for name, w in work.items() if w.library.name}
    assert libraries == {
        "sorted": ("sorting", 4),  # bytes of a key
        "freq": ("fourier", 2),
        "back": ("fourier", 3),  # its operand is copied first
        "l": ("factoring", 1),
        "s": ("factoring", 1),
    }
    assert work["l"].vector_ops == pytest.approx(8**3 / 3)
    assert work["s"].vector_ops == 8 * 8 * 2
    assert work["r"].vector_ops == 2 * 64
    assert work["c"].channels == Channels(2, 4, 3, is_kernel_gradient=False)


COUNTED = """HloModule m, is_scheduled=true
%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

%condition (q: f32[8]) -> pred[] {
  %q = f32[8]{0} parameter(0)
  ROOT %test = pred[] custom-call(%q), custom_call_target="test"
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %w = f32[8]{0} while(%x), condition=%condition, body=%bodyCOUNT
}
"""


def test_conditions_of_counted_loops_do_not_run() -> None:
    """XLA:GPU repeats the body: the kernel of a condition is in no profile."""
    count = ', backend_config={"known_trip_count":{"n":"5"}}'
    assert [
        (w.name, w.count) for w in _read(COUNTED.replace("COUNT", count)).items
    ] == [("n", 5)]
    assert {w.name for w in _read(COUNTED.replace("COUNT", "")).items} == {"n", "test"}


def test_a_kernel_that_says_nothing_is_noted() -> None:
    (note,) = _recorded("work_tpu_kernel").notes
    assert note == (
        "FLOPs of these calls cannot be read, only their bytes: tpu_custom_call (1)."
    )


FUSED = """
%fused (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""  # noqa: E501

LOOP = """HloModule m, is_scheduled=true
FUSED
%body (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %s = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%s), index=1
  %j = s32[] fusion(%i), kind=kLoop, calls=%next
  %y = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%j, %y)
}

%next (i: s32[]) -> s32[] {
  %i = s32[] parameter(0)
  %half = s32[] constant(2)
  ROOT %j = s32[] divide(%i, %half)
}

%cond (s: (s32[], f32[8,8])) -> pred[] {
  %s = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %zero = s32[] constant(0)
  ROOT %c = pred[] compare(%i, %zero), direction=GT
}

ENTRY %main (n: s32[], x: f32[8,8]) -> (s32[], f32[8,8]) {
  %n = s32[] parameter(0)
  %x = f32[8,8]{1,0} parameter(1)
  %t = (s32[], f32[8,8]{1,0}) tuple(%n, %x)
  ROOT %w = (s32[], f32[8,8]{1,0}) while(%t), condition=%cond, body=%bodyKNOWN
}
""".replace("FUSED", FUSED)


def test_a_loop_whose_count_depends_on_data_counts_once() -> None:
    work = _read(LOOP.replace("KNOWN", ""))
    assert work.flops == 2 * 8**3
    (note,) = work.notes
    assert note == "The count of loop w depends on data; it counts once."


def test_a_count_that_the_compiler_knows() -> None:
    known = ', backend_config={"known_trip_count":{"n":"7"}}'
    work = _read(LOOP.replace("KNOWN", known))
    assert (work.flops, work.notes) == (7 * 2 * 8**3, ())


ENTRY = """HloModule m, is_scheduled=true
FUSED
%fetched (p: f32[8,8]) -> f32[4,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %q = f32[4,8]{1,0:S(1)} slice(%p), slice={[0:4], [0:8]}
}

%offloaded (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %r = f32[8,8]{1,0} custom-call(%p), custom_call_target="SparseCore",\
 called_computations={%called}
}

%called (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %s = ((f32[8,8]), f32[8,8], u32[]) async-start(%p), calls=%fused,\
 async_execution_thread="sparsecore"
  ROOT %r = f32[8,8]{1,0} async-done(%s)
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  BODY
}
""".replace("FUSED", FUSED)

SPARSE = 'async_execution_thread="sparsecore", '


@pytest.mark.parametrize(
    ("body", "flops"),
    [
        # XLA:GPU starts a fusion on a stream of its own.
        (
            "%s = ((f32[8,8]), f32[8,8], u32[]) fusion-start(%x), calls=%fused\n"
            "  ROOT %r = f32[8,8]{1,0} fusion-done(%s)",
            2 * 8**3,
        ),
        (
            "%s = ((f32[8,8]), f32[8,8], u32[]) call-start(%x), to_apply=%fused\n"
            "  ROOT %r = f32[8,8]{1,0} call-done(%s)",
            2 * 8**3,
        ),
        # A TPU's SparseCore.
        (
            f"%s = ((f32[8,8]), f32[8,8], u32[]) call-start(%x), {SPARSE}"
            "to_apply=%fused\n"
            "  ROOT %r = f32[8,8]{1,0} call-done(%s)",
            2 * 8**3,
        ),
        # It is prepared first, and gets its data later.
        (
            f"%s = ((), (), (s32[8])) async-start(), {SPARSE}calls=%offloaded\n"
            "  %u = ((f32[8,8]), f32[8,8], (s32[8])) async-update(%s, %x)\n"
            "  ROOT %r = f32[8,8]{1,0} async-done(%u)",
            2 * 8**3,
        ),
        ("ROOT %r = f32[8,8]{1,0} call(%x), to_apply=%fused", 2 * 8**3),
        (
            "%s = (f32[8,8]{1,0:S(1)}, f32[8,8]{1,0}, u32[]) copy-start(%x)\n"
            "  ROOT %r = f32[8,8]{1,0:S(1)} copy-done(%s)",
            0,
        ),
        # XLA:TPU fetches weights into vector memory beside other kernels.
        (
            "%s = ((f32[8,8]), f32[4,8]{1,0:S(1)}, u32[]) async-start(%x),"
            " calls=%fetched\n"
            "  ROOT %r = f32[4,8]{1,0:S(1)} async-done(%s)",
            0,
        ),
    ],
)
def test_what_runs_beside(body: str, flops: int) -> None:
    work = _read(ENTRY.replace("BODY", body))
    assert work.flops == flops
    assert bool(work.items) == bool(flops)


CHAIN = """HloModule m, is_scheduled=true
%carries_on (p: bf16[8,8]) -> (bf16[8,8], bf16[8,8]) {
  %p = bf16[8,8]{1,0} parameter(0)
  %g = bf16[8,8]{1,0} all-gather(%p), replica_groups={{0}}, dimensions={0}
  %d = bf16[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) tuple(%d, %g)
}

%ends (p: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  %g = bf16[8,8]{1,0} all-gather(%p), replica_groups={{0}}, dimensions={0}
  ROOT %r = bf16[8,8]{1,0} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {
  %x = bf16[8,8]{1,0} parameter(0)
  %f = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) fusion(%x), kind=kOutput, calls=%carries_on,\
 backend_config={"window_config":{"estimated_cycles":"900"}}
  %y = bf16[8,8]{1,0} get-tuple-element(%f), index=1
  ROOT %r = bf16[8,8]{1,0} fusion(%y), kind=kCustom, calls=%ends
}
"""


def test_a_fusion_that_carries_on_with_a_collective_computes() -> None:
    (work,) = _read(CHAIN).items
    assert (work.name, work.cycles, work.flops) == ("f", 900, 2 * 8**3)


def test_an_estimate_that_was_never_made() -> None:
    never = str(2**63 - 1)
    text = CHAIN.replace('"estimated_cycles":"900"', f'"estimated_cycles":"{never}"')
    plain = text.replace(
        "  %g = bf16[8,8]{1,0} all-gather(%p), replica_groups={{0}}, dimensions={0}\n"
        "  %d",
        "  %g = bf16[8,8]{1,0} negate(%p)\n  %d",
    )
    (work,) = _read(plain).items
    assert (work.name, work.cycles) == ("f", None)


def test_what_a_sparse_core_does_is_noted() -> None:
    body = (
        f"%s = ((f32[8,8]), f32[8,8], u32[]) call-start(%x), {SPARSE}"
        "to_apply=%fused\n  ROOT %r = f32[8,8]{1,0} call-done(%s)"
    )
    (note,) = _read(ENTRY.replace("BODY", body)).notes
    assert note == (
        "SparseCores run calls (1), of which the compiler estimates no time: they count"
        " at the memory's rate, as if nothing ran beside them."
    )
    # A collective there is a collective.
    moving = body.replace("%fused", "%gather")
    gather = (
        "\n%gather (p: f32[8,8]) -> f32[8,8] {\n  %p = f32[8,8]{1,0} parameter(0)\n"
        "  ROOT %g = f32[8,8]{1,0} all-gather(%p), replica_groups={{0}}\n}\n\nENTRY"
    )
    text = ENTRY.replace("\nENTRY", gather).replace("BODY", moving)
    assert _read(text).notes == ()


COLLECTIVES = (
    "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter",
)  # fmt: skip
TPU_PROGRAMS = sorted(
    p for p in HLO.glob("*.hlo.gz") if p.name.split(".")[1].startswith(("v", "tpu"))
)


@pytest.mark.parametrize("path", TPU_PROGRAMS, ids=lambda p: p.name[:30])
def test_on_tpu_cycles_are_those_of_compute(path: Path) -> None:
    """What timing relies on: no collective, and no step of one, carries cycles."""
    module = parse_module(gzip.decompress(path.read_bytes()).decode())
    moving = [
        instruction
        for computation in module.computations.values()
        for instruction in computation
        if instruction.opcode.removesuffix("-start") in COLLECTIVES
        or "all-reduce-scatter" in instruction.attribute("calls")
    ]
    assert moving
    assert not [i.name for i in moving if "estimated_cycles" in i.attributes]


def test_a_fusion_beside_a_gather_has_the_cycles_of_its_dot() -> None:
    (path,) = (p for p in TPU_PROGRAMS if p.name.startswith("gpt.v5e"))
    module = parse_module(gzip.decompress(path.read_bytes()).decode())
    called = {
        i.name: i.attribute("calls") for c in module.computations.values() for i in c
    }
    rates = [
        work.flops / work.cycles
        for work in WorkReader(module, _weight).program().items
        if work.flops
        and work.cycles
        and called[work.name].startswith("async_collective_fusion")
    ]
    # Of the 131,072 FLOPs of the MXUs in a cycle: no room for the transfer's time.
    assert 0.8 * 131_072 < max(rates) < 131_072
