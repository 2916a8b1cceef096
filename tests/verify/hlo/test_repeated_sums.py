"""Sums that count the same parts several times, on a mesh of a=2 × b=4."""

from __future__ import annotations

import pytest

from rhino_jax.verify.hlo.collectives.groups import map_mesh
from rhino_jax.verify.hlo.collectives.repeated_sums import by_compiler, repeated_sums
from rhino_jax.verify.hlo.module import parse_module


MESH = map_mesh((("a", 2), ("b", 4)))
ROWS_OVER_A = "devices=[2,1,4]<=[8] last_tile_dim_replicate"
ROWS_OVER_B = "devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate"
ROWS_OVER_BOTH = "devices=[8,1]<=[8]"
LISTED_OVER_A = "devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dims={replicated}"
ALL, OVER_A, OVER_B = "[1,8]<=[8]", "[4,2]<=[2,4]T(1,0)", "[2,4]<=[8]"

HEAD = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%max (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %m = f32[] maximum(%p, %q)
}

%square (v: f32[8,8]) -> f32[8,8] {
  %v = f32[8,8]{1,0} parameter(0)
  ROOT %vv = f32[8,8]{1,0} multiply(%v, %v)
}

%row (table: s32[8], id: u32[]) -> s32[1] {
  %table = s32[8]{0} parameter(0)
  %id = u32[] parameter(1)
  ROOT %slice = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}
}
"""
META = 'metadata={op_name="jit(step)/dot_general" source_file="step.py" source_line=3}'


def entry(sharding: str, *lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"{HEAD}\nENTRY %main (w: f32[8,8]) -> f32[8,8] {{\n"
        f"  %w = f32[8,8]{{1,0}} parameter(0), sharding={{{sharding}}}\n{body}\n}}\n"
    )


def reduced(operand: str, groups: str, by: str = "add") -> str:
    return (
        f"ROOT %r = f32[8,8]{{1,0}} all-reduce(%{operand}),"
        f" replica_groups={groups}, to_apply=%{by}, {META}"
    )


def times(text: str) -> list[tuple[tuple[str, ...], int]]:
    return [(x.repeated, x.times) for x in repeated_sums(parse_module(text), MESH)]


@pytest.mark.parametrize(
    ("sharding", "groups", "expected"),
    [
        (ROWS_OVER_A, ALL, [(("b",), 4)]),
        (LISTED_OVER_A, ALL, [(("b",), 4)]),
        (ROWS_OVER_A, OVER_B, [(("b",), 4)]),
        (ROWS_OVER_A, OVER_A, []),
        (ROWS_OVER_B, ALL, [(("a",), 2)]),
        (ROWS_OVER_B, OVER_B, []),
        (ROWS_OVER_BOTH, ALL, []),
        ("replicated", ALL, [(("a", "b"), 8)]),
        ("devices=[2,1,4]<=[8] last_tile_dims={manual}", ALL, []),
    ],
)
def test_an_operand_that_is_the_same_along_an_axis_of_the_groups(
    sharding: str, groups: str, expected: list[tuple[tuple[str, ...], int]]
) -> None:
    square = "%s = f32[8,8]{1,0} fusion(%w), kind=kLoop, calls=%square"
    assert times(entry(sharding, square, reduced("s", groups))) == expected


def test_the_largest_of_equal_values_is_right() -> None:
    assert times(entry(ROWS_OVER_A, reduced("w", ALL, by="max"))) == []


def test_a_sum_over_one_axis_after_a_sum_over_it() -> None:
    first = (
        f"%f = f32[8,8]{{1,0}} all-reduce(%w), replica_groups={OVER_A}, to_apply=%add"
    )
    assert times(entry(ROWS_OVER_BOTH, first, reduced("f", OVER_B))) == []
    assert times(entry(ROWS_OVER_BOTH, first, reduced("f", ALL))) == [(("a",), 2)]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("0, 0, 0, 0, 1, 1, 1, 1", [(("b",), 4)]),
        ("0, 1, 2, 3, 0, 1, 2, 3", [(("a",), 2)]),
    ],
)
def test_a_position_that_is_looked_up_by_the_devices_number(
    table: str, expected: list[tuple[tuple[str, ...], int]]
) -> None:
    lines = (
        f"%rows = s32[8]{{0}} constant({{{table}}})",
        "%id = u32[] partition-id()",
        "%at = s32[1]{0} fusion(%rows, %id), kind=kLoop, calls=%row",
        "%part = f32[8,8]{1,0} dynamic-update-slice(%w, %w, %at, %at)",
    )
    assert times(entry("replicated", *lines, reduced("part", ALL))) == expected


def test_values_that_pass_an_optimization_barrier_together() -> None:
    """As XLA prints it: each element of the tuple stays as replicated as it was."""
    lines = (
        "%one = f32[] constant(1)",
        "%all = f32[8,8]{1,0} broadcast(%one), dimensions={}",
        "%both = (f32[8,8], f32[8,8]) tuple(%w, %all)",
        "%behind = (f32[8,8], f32[8,8]) opt-barrier(%both)",
        "%part = f32[8,8]{1,0} get-tuple-element(%behind), index=1",
    )
    found = times(entry(ROWS_OVER_BOTH, *lines, reduced("part", OVER_B)))
    assert found == [(("b",), 4)]


def test_shardings_that_the_text_does_not_have_and_a_table_that_is_copied() -> None:
    text = entry(
        "replicated",
        "%rows = s32[8]{0} constant({0, 0, 0, 0, 1, 1, 1, 1})",
        "%begun = (s32[8], s32[8], u32[]) copy-start(%rows)",
        "%near = s32[8]{0} copy-done(%begun)",
        "%id = u32[] partition-id()",
        "%at = s32[1]{0} dynamic-slice(%near, %id), dynamic_slice_sizes={1}",
        '%room = f32[8,8] custom-call(), custom_call_target="AllocateBuffer"',
        "%part = f32[8,8]{1,0} dynamic-update-slice(%room, %w, %at, %at)",
        reduced("part", ALL),
    ).replace(", sharding={replicated}", "")
    assert times(text) == []
    module = parse_module(text)
    known = [
        [x.times for x in repeated_sums(module, MESH, [frozenset(axes)])]
        for axes in ("", "b", "a")
    ]
    assert known == [[4], [], [4]]


def test_one_device_of_a_group_alone_is_right() -> None:
    lines = (
        "%id = u32[] partition-id()",
        "%part = f32[8,8]{1,0} dynamic-update-slice(%w, %w, %id, %id)",
    )
    assert times(entry("replicated", *lines, reduced("part", ALL))) == []


LOOP = """
%body (s: (s32[], f32[8,8], f32[8,8])) -> (s32[], f32[8,8], f32[8,8]) {
  %s = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %same = f32[8,8]{1,0} get-tuple-element(%s), index=1
  %other = f32[8,8]{1,0} get-tuple-element(%s), index=2
  %r1 = f32[8,8]{1,0} all-reduce(%same), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %t = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%i, NEXT, %other)
}

%condition (c: (s32[], f32[8,8], f32[8,8])) -> pred[] {
  %c = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  ROOT %go = pred[] compare(%n, %n), direction=LT
}

ENTRY %main (w: f32[8,8], x: f32[8,8]) -> f32[8,8] {
  %w = f32[8,8]{1,0} parameter(0), sharding={replicated}
  %x = f32[8,8]{1,0} parameter(1), sharding={devices=[8,1]<=[8]}
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,8], f32[8,8]) tuple(%zero, %w, %x)
  %loop = (s32[], f32[8,8], f32[8,8]) while(%start), condition=%condition, body=%body
  ROOT %out = f32[8,8]{1,0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("following", "expected"), [("%same", [(("a", "b"), 8)]), ("%other", [])]
)
def test_a_loop_carries_what_is_the_same_in_every_trip(
    following: str, expected: list[tuple[tuple[str, ...], int]]
) -> None:
    assert times(HEAD + LOOP.replace("NEXT", following)) == expected


def test_it_names_line_and_factor_and_leaves_what_users_wrote() -> None:
    text = entry(ROWS_OVER_A, reduced("w", ALL))
    (found,) = repeated_sums(parse_module(text), MESH)
    said = str(found)
    assert "all-reduce over a × b" in said and "step.py:3" in said
    assert "4 times too large" in said
    assert by_compiler([found]) == (found,)
    by_hand = text.replace("jit(step)/", "jit(step)/shard_map/")
    (wrote,) = repeated_sums(parse_module(by_hand), MESH)
    assert by_compiler([wrote]) == ()
    assert by_compiler([wrote], in_stages=True) == (wrote,)
    # Over more axes than the program asks for there, or anywhere.
    for axes, line in (("b", "step.py:3"), ("ab", "step.py:9")):
        assert by_compiler([wrote], {line: frozenset(axes)}) == ()
    for known in ({}, {"step.py:3": frozenset("a")}, {"step.py:9": frozenset("a")}):
        assert by_compiler([wrote], known) == (wrote,)
