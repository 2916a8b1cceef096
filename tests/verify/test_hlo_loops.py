"""Trip counts, from what the compiler says and from the loop itself."""

from __future__ import annotations

import pytest

from rhino_jax.verify.hlo import parse_module
from rhino_jax.verify.loops import trip_count


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
    return trip_count(module, main, main.instructions["w"])


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
    assert trip_count(module, main, main.instructions["w"]) == 4
