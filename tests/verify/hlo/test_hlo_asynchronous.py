"""Transfers that are started in one place and finished in another."""

from __future__ import annotations

import pytest

from tests.verify.hlo.collectives_of import read_collectives


MESH = (("x", 2), ("y", 4))
ROW = "replica_groups=[2,4]<=[8]"
RING = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"


def module(entry: str, *others: str) -> str:
    rest = "\n".join(others)
    return f"""HloModule m, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}
{rest}
ENTRY %main (p: f32[64], i: u32[]) -> f32[64] {{
  %p = f32[64]{{0}} parameter(0)
  %i = u32[] parameter(1)
{entry}
}}
"""


def read(entry: str, *others: str):
    return [
        (c.kind, c.axes, c.bytes, c.count, c.is_async)
        for c in read_collectives(module(entry, *others), MESH)
    ]


START = f"  %s = (f32[64], f32[256]) all-gather-start(%p), {ROW}, dimensions={{0}}"
DONE = "  ROOT %d = f32[256]{0} all-gather-done(%s)"
FACT = ', backend_config={"collective_backend_config":{"is_sync":true}}'


@pytest.mark.parametrize(
    ("lines", "is_async"),
    [
        ([START, DONE], False),
        ([START, "  %w = f32[64]{0} negate(%p)", DONE], True),
        ([START + FACT, "  %w = f32[64]{0} negate(%p)", DONE], False),
        (["  %w = f32[64]{0} negate(%p)", START, DONE], False),
        ([START, DONE.replace("ROOT ", ""), "  %w = f32[64]{0} negate(%p)"], False),
        # What takes no time, counts for the loop, or moves data itself, hides nothing.
        ([START, "  %w = f32[8,8]{1,0} bitcast(%p)", DONE], False),
        ([START, "  %w = u32[] add(%i, %i)", DONE], False),
        (
            [START, f"  %w = f32[64]{{0}} all-reduce(%p), {ROW}, to_apply=%add", DONE],
            False,
        ),
    ],
)
def test_a_pair_is_asynchronous_if_something_runs_between(lines, is_async) -> None:
    found = [f for f in read("\n".join(lines)) if f[0] == "all-gather"]
    assert found == [("all-gather", ("y",), 3 * 256, 1, is_async)]


def test_a_transfer_that_is_finished_elsewhere_is_asynchronous() -> None:
    assert read(START.replace("  %s", "  ROOT %s")) == [
        ("all-gather", ("y",), 3 * 256, 1, True)
    ]


WRAPPED = f"""
%wrapped (q: f32[64]) -> f32[16] {{
  %q = f32[64]{{0}} parameter(0)
  ROOT %rs = f32[16]{{0}} reduce-scatter(%q), {ROW}, dimensions={{0}}, to_apply=%add
}}, execution_thread="sparsecore"
"""


@pytest.mark.parametrize("opcode", ["async", "custom-call"])
@pytest.mark.parametrize("work", ["bitcast", "negate"])
def test_a_wrapped_collective_counts_where_it_starts(opcode: str, work: str) -> None:
    entry = f"""
  %s = ((f32[64]), f32[16], s32[]) {opcode}-start(%p), calls=%wrapped
  %w = f32[64]{{0}} {work}(%p)
  %u = ((f32[64]), f32[16], s32[]) {opcode}-update(%s), calls=%wrapped
  ROOT %d = f32[16]{{0}} {opcode}-done(%u), calls=%wrapped"""
    expected = ("reduce-scatter", ("y",), 3 * 256 // 4, 1, work == "negate")
    assert read(entry, WRAPPED) == [expected]


def test_a_prepared_transfer_starts_where_it_gets_its_data() -> None:
    entry = """
  %s = ((), (), (s32[8])) custom-call-start(), called_computations={%wrapped}
  %w = f32[64]{0} negate(%p)
  %u = ((f32[64]), f32[16], (s32[8])) custom-call-update(%s, %w)
  ROOT %d = f32[16]{0} custom-call-done(%u)"""
    assert read(entry, WRAPPED) == [("reduce-scatter", ("y",), 192, 1, False)]


TARGET = 'custom_call_target="AsyncCollective'
CHAIN = f'{ROW}, dimensions={{0}}, frontend_attributes={{chain_id="3"}}'
CHAINED = (
    f"""
%first (q: f32[64]) -> (f32[64], f32[256], u32[]) {{
  %q = f32[64]{{0}} parameter(0)
  %ag.1 = f32[256]{{0}} all-gather(%q), channel_id=7, {CHAIN}
  ROOT %t.1 = (f32[64], f32[256], u32[]) custom-call(%ag.1), {TARGET}Start"
}}
""",
    f"""
%async_collective_fusion (q.2: f32[64], r.2: f32[256]) -> (f32[64], f32[256]) {{
  %q.2 = f32[64]{{0}} parameter(0)
  %r.2 = f32[256]{{0}} parameter(1)
  %ag.2 = f32[256]{{0}} all-gather(%q.2), channel_id=7, {CHAIN}
  %work = f32[64]{{0}} negate(%q.2)
  ROOT %t.2 = (f32[64], f32[256]) tuple(%work, %ag.2)
}}
""",
    f"""
%last (q.3: f32[64], r.3: f32[256]) -> f32[256] {{
  %q.3 = f32[64]{{0}} parameter(0)
  %r.3 = f32[256]{{0}} parameter(1)
  %ag.3 = f32[256]{{0}} all-gather(%q.3), channel_id=7, {CHAIN}
  ROOT %t.3 = f32[256]{{0}} custom-call(%q.3, %r.3, %ag.3), {TARGET}Done"
}}
""",
    """
%cond (c: (u32[], f32[64], f32[256])) -> pred[] {
  %c = (u32[], f32[64], f32[256]) parameter(0)
  %ci = u32[] get-tuple-element(%c), index=0
  %bound = u32[] constant(10)
  ROOT %lt = pred[] compare(%ci, %bound), direction=LT
}

%body (s: (u32[], f32[64], f32[256])) -> (u32[], f32[64], f32[256]) {
  %s = (u32[], f32[64], f32[256]) parameter(0)
  %si = u32[] get-tuple-element(%s), index=0
  %two = u32[] constant(2)
  %next = u32[] add(%si, %two)
  %sa = f32[64]{0} get-tuple-element(%s), index=1
  %sb = f32[256]{0} get-tuple-element(%s), index=2
  %f.2 = (f32[64], f32[256]) fusion(%sa, %sb), calls=%async_collective_fusion
  %fa = f32[64]{0} get-tuple-element(%f.2), index=0
  %fb = f32[256]{0} get-tuple-element(%f.2), index=1
  ROOT %t = (u32[], f32[64], f32[256]) tuple(%next, %fa, %fb)
}
""",
)


def test_a_chain_through_a_loop_happens_once() -> None:
    entry = """
  %f.1 = (f32[64], f32[256], u32[]) fusion(%p), kind=kCustom, calls=%first
  %ga = f32[64]{0} get-tuple-element(%f.1), index=0
  %gb = f32[256]{0} get-tuple-element(%f.1), index=1
  %zero = u32[] constant(0)
  %state = (u32[], f32[64], f32[256]) tuple(%zero, %ga, %gb)
  %loop = (u32[], f32[64], f32[256]) while(%state), condition=%cond, body=%body
  %la = f32[64]{0} get-tuple-element(%loop), index=1
  %lb = f32[256]{0} get-tuple-element(%loop), index=2
  ROOT %f.3 = f32[256]{0} fusion(%la, %lb), kind=kCustom, calls=%last"""
    assert read(entry, *CHAINED) == [("all-gather", ("y",), 3 * 256, 1, True)]


def test_a_chain_that_starts_in_a_loop_happens_in_every_run() -> None:
    body = CHAINED[3].replace(
        "%f.2 = (f32[64], f32[256]) fusion(%sa, %sb), calls=%async_collective_fusion",
        "%f.2 = (f32[64], f32[256], u32[]) fusion(%sa), calls=%first",
    )
    entry = """
  %zero = u32[] constant(0)
  %big = f32[256]{0} broadcast(%zero), dimensions={}
  %state = (u32[], f32[64], f32[256]) tuple(%zero, %p, %big)
  ROOT %loop = (u32[], f32[64], f32[256]) while(%state), condition=%cond, body=%body"""
    found = read(entry, CHAINED[0], body)
    assert found == [("all-gather", ("y",), 5 * 3 * 256, 5, True)]


@pytest.mark.parametrize(
    ("line", "sent_bytes"),
    [
        # Context words and the place to write to are no payload.
        (f"collective-permute-start(%p), {RING}", 256),
        (f"collective-permute(%p, %p, %i, %i), {RING}, slice_sizes={{{{16}}}}", 64),
        (
            f"collective-permute(%p, %p, %i, %i), {RING}, slice_sizes={{{{4}},{{8}}}}",
            48,
        ),
        (f"collective-permute(%p, %p), {RING}", 512),
        (f"ragged-all-to-all(%p, %p, %i, %i, %i, %i), {ROW}", 192),
        (f"all-to-all(%p, %p, %p, %p), {ROW}", 3 * 256),
        (f"all-to-all(%p), {ROW}, dimensions={{0}}", 192),
        (f"all-reduce(%p, %p), {ROW}, to_apply=%add", 2 * 2 * 192),
        (f"collective-broadcast(%p), {ROW}", 256),
    ],
)
def test_what_one_device_sends(line: str, sent_bytes: int) -> None:
    type_ = "(f32[64], f32[64], u32[], u32[])"
    ((*_, moved, count, _),) = read(f"  ROOT %r = {type_} {line}")
    assert (moved, count) == (sent_bytes, 1)
