"""Trip counts, from what the compiler says and from the loop itself."""

from __future__ import annotations

import pytest

from rhino_jax.verify.hlo.loops import trips_of
from rhino_jax.verify.hlo.module import parse_module


def count_of(
    *,
    start: str = "s32[] constant(0)",
    compare: str = "compare(%i, %n), direction=LT",
    bound: str = "s32[] constant(10)",
    step: str = "add(%i, %one)",
    one: str = "s32[] constant(1)",
    config: str = "",
) -> int | None:
    text = f"""HloModule m, is_scheduled=true

%cond (p: (s32[], f32[4])) -> pred[] {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = {bound}
  ROOT %c = pred[] {compare}
}}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p = (s32[], f32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{{0}} get-tuple-element(%p), index=1
  %one = {one}
  %j = s32[] {step}
  %k = s32[] copy(%j)
  ROOT %t = (s32[], f32[4]{{0}}) tuple(%k, %x)
}}

ENTRY %main (a: f32[4], s: s32[]) -> f32[4] {{
  %a = f32[4]{{0}} parameter(0)
  %s = s32[] parameter(1)
  %z = {start}
  %t = (s32[], f32[4]{{0}}) tuple(%z, %a)
  %w = (s32[], f32[4]{{0}}) while(%t), condition=%cond, body=%body{config}
  ROOT %r = f32[4]{{0}} get-tuple-element(%w), index=1
}}
"""
    module = parse_module(text)
    main = module.computations[module.entry]
    count, is_known = trips_of(module, main, main.instructions["w"])
    return count if is_known else None


@pytest.mark.parametrize(
    ("loop", "count"),
    [
        ({}, 10),
        ({"config": ', backend_config={"known_trip_count":{"n":"7"}}'}, 7),
        ({"one": "s32[] constant(2)"}, 5),
        ({"one": "s32[] constant(3)"}, 4),
        ({"start": "s32[] constant(4)"}, 6),
        ({"start": "s32[] constant(11)"}, 0),
        ({"compare": "compare(%i, %n), direction=LE"}, 11),
        ({"compare": "compare(%n, %i), direction=GT"}, 10),
        ({"compare": "compare(%i, %n), direction=NE"}, 10),
        (
            {
                "start": "s32[] constant(9)",
                "bound": "s32[] constant(0)",
                "compare": "compare(%i, %n), direction=GE",
                "step": "subtract(%i, %one)",
            },
            10,
        ),
        (
            {
                "start": "s32[] constant(9)",
                "bound": "s32[] constant(-1)",
                "compare": "compare(%i, %n), direction=NE",
                "one": "s32[] constant(-1)",
            },
            10,
        ),
        ({"step": "add(%one, %i)"}, 10),
        ({"start": "u32[] constant(0)", "bound": "u32[] constant(10)"}, 10),
        ({"start": "s32[] copy(%s)"}, None),
        ({"bound": "s32[] negate(%i)"}, None),
        ({"step": "multiply(%i, %one)"}, None),
        ({"step": "subtract(%one, %i)"}, None),
        ({"compare": "compare(%i, %n), direction=GT"}, None),
        ({"compare": "and(%i, %n)"}, None),
    ],
)
def test_counts(loop, count: int | None) -> None:
    assert count_of(**loop) == count


FUSED = """HloModule m

%lt (a: s32[], b: s32[]) -> pred[] {
  %b = s32[] parameter(1)
  %a = s32[] parameter(0)
  ROOT %c = pred[] compare(%a, %b), direction=LT
}

%inc (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %b = s32[] add(%a, %two)
}

%cond (p: (f32[4], s32[], s32[])) -> pred[] {
  %p = (f32[4]{0}, s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=1
  %n = s32[] constant(9)
  ROOT %c = pred[] fusion(%i, %n), kind=kLoop, calls=%lt
}

%body (p: (f32[4], s32[], s32[])) -> (f32[4], s32[], s32[]) {
  %p = (f32[4]{0}, s32[], s32[]) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=0
  %i = s32[] get-tuple-element(%p), index=1
  %k = s32[] get-tuple-element(%p), index=2
  %j = s32[] fusion(%i), kind=kLoop, calls=%inc
  ROOT %t = (f32[4]{0}, s32[], s32[]) tuple(%x, %j, %k)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %z = s32[] constant(1)
  %k = s32[] constant(5)
  %t = (f32[4]{0}, s32[], s32[]) tuple(%a, %z, %k)
  %w = (f32[4]{0}, s32[], s32[]) while(%t), condition=%cond, body=%body
  ROOT %r = f32[4]{0} get-tuple-element(%w), index=0
}
"""


def test_counter_bound_and_step_inside_fusions() -> None:
    module = parse_module(FUSED)
    main = module.computations[module.entry]
    assert trips_of(module, main, main.instructions["w"]) == (4, True)


CARRIED = """HloModule m

%inner_cond (p: (s32[], s32[], s32[])) -> pred[] {
  %p.1 = (s32[], s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n.1 = s32[] get-tuple-element(%p.1), index=1
  ROOT %c.1 = pred[] compare(%i.1, %n.1), direction=LT
}

%inner (p: (s32[], s32[], s32[])) -> (s32[], s32[], s32[]) {
  %p.2 = (s32[], s32[], s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %n.2 = s32[] get-tuple-element(%p.2), index=1
  %one = s32[] get-tuple-element(%p.2), index=2
  %j = s32[] add(%one, %i.2)
  ROOT %t.2 = (s32[], s32[], s32[]) tuple(%j, BOUND, %one)
}

%outer_cond (p: (s32[], s32[], s32[])) -> pred[] {
  %p.3 = (s32[], s32[], s32[]) parameter(0)
  %i.3 = s32[] get-tuple-element(%p.3), index=2
  %n.3 = s32[] constant(0)
  ROOT %c.3 = pred[] compare(%i.3, %n.3), direction=GT
}

%outer (p: (s32[], s32[], s32[])) -> (s32[], s32[], s32[]) {
  %p.4 = (s32[], s32[], s32[]) parameter(0)
  %zero = s32[] get-tuple-element(%p.4), index=0
  %bound = s32[] get-tuple-element(%p.4), index=1
  %k = s32[] get-tuple-element(%p.4), index=2
  %by = s32[] constant(1)
  %t.4 = (s32[], s32[], s32[]) tuple(%zero, %bound, %by)
  %w.4 = (s32[], s32[], s32[]) while(%t.4), condition=%inner_cond, body=%inner
  %less = s32[] subtract(%k, %by)
  ROOT %t.5 = (s32[], s32[], s32[]) tuple(%zero, %bound, %less)
}

ENTRY %main () -> (s32[], s32[], s32[]) {
  %start = s32[] constant(2)
  %end = s32[] constant(9)
  %times = s32[] constant(4)
  %t.6 = (s32[], s32[], s32[]) tuple(%start, %end, %times)
  ROOT %w.6 = (s32[], s32[], s32[]) while(%t.6), condition=%outer_cond, body=%outer
}
"""


@pytest.mark.parametrize(("bound", "trips"), [("%n.2", (7, True)), ("%j", (1, False))])
def test_what_loops_carry_unchanged_is_constant(
    bound: str, trips: tuple[int, bool]
) -> None:
    module = parse_module(CARRIED.replace("BOUND", bound))
    outer = module.computations["outer"]
    assert trips_of(module, outer, outer.instructions["w.4"]) == trips
    main = module.computations["main"]
    assert trips_of(module, main, main.instructions["w.6"]) == (4, True)
