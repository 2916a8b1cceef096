"""The text form, against a golden text."""

from __future__ import annotations

import pytest

from rhino_jax.ir.factor import parse_rule
from rhino_jax.ir.printer import format_type
from rhino_jax.ir.program import (
    Input,
    Op,
    Output,
    Program,
    Region,
    RegionCall,
    RegionKind,
    Source,
    Value,
)


SOURCE = Source("/home/user/train.py", 12, "loss")

GOLDEN = """\
program step
  %0: f32[8,16]  w  donated
  %1: bf16[3,4,8]  batch['x']
  %2: key<fry>[]  const[0] key<fry>[]  const
%3: f32[4], %4: f32[3,4,16] = scan %0 literal:f32[4] %1  \
<scan, 3 trips, 1 consts, 1 carries>  # train.py:12 (loss)
  region(%6: f32[8,16], %7: f32[4], %8: bf16[4,8])
    %9: f32[4,16] = dot_general %8 %6  {b k, k n -> b n}  [contract 1 with 0]  \
# train.py:12 (loss)
    %10: f32[4] = mystery %9  {unknown}  # layer/mlp
    yield %10 %9
%11: f32[8,16] = neg %0  {a b -> a b}  # ?
return
  %11  [0]  state of w
  %3  [1]"""


def sample() -> Program:
    shapes = [
        ((8, 16), "float32"), ((3, 4, 8), "bfloat16"), ((), "key<fry>"),
        ((4,), "float32"), ((3, 4, 16), "float32"), ((4,), "float32"),
        ((8, 16), "float32"), ((4,), "float32"), ((4, 8), "bfloat16"),
        ((4, 16), "float32"), ((4,), "float32"), ((8, 16), "float32"),
    ]  # fmt: skip
    values = tuple(Value(i, s, d, i == 5) for i, (s, d) in enumerate(shapes))
    call = RegionCall(
        RegionKind.SCAN,
        (Region((6, 7, 8), (1, 2), (10, 9)),),
        num_consts=1,
        num_carry=1,
        trip_count=3,
    )
    dot = parse_rule("b k, k n -> b n", [(4, 8), (8, 16)], [(4, 16)])
    uncut = parse_rule("_ _ -> _", [(4, 16)], [(4,)])
    neg = parse_rule("a b -> a b", [(8, 16)], [(8, 16)])
    ops = (
        Op(0, "scan", (0, 5, 1), (3, 4), None, call=call, source=SOURCE),
        Op(
            1, "dot_general", (8, 6), (9,), dot, source=SOURCE,
            label="contract 1 with 0",
        ),
        Op(
            2, "mystery", (9,), (10,), uncut, is_known=False,
            source=Source(name_stack="layer/mlp"),
        ),
        Op(3, "neg", (0,), (11,), neg),
    )  # fmt: skip
    return Program(
        name="step",
        values=values,
        ops=ops,
        inputs=(
            Input(0, "w", is_donated=True),
            Input(1, "batch['x']"),
            Input(2, "const[0] key<fry>[]", is_const=True),
        ),
        outputs=(Output(11, "[0]", state_of=0), Output(3, "[1]")),
        body=Region((0, 1, 2), (0, 3), (11, 3)),
    )


def test_golden_text() -> None:
    assert str(sample()) == GOLDEN


def test_str_is_the_text_form() -> None:
    assert str(sample()) == GOLDEN


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("float32", "f32[2]"),
        ("bfloat16", "bf16[2]"),
        ("int8", "i8[2]"),
        ("uint4", "u4[2]"),
        ("complex64", "c64[2]"),
        ("bool", "bool[2]"),
        ("float8_e4m3fn", "float8_e4m3fn[2]"),
        ("key<fry>", "key<fry>[2]"),
        ("token", "token[2]"),
    ],
)
def test_types(dtype: str, text: str) -> None:
    assert format_type(Value(0, (2,), dtype)) == text
