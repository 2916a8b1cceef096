"""The verifier: accepts good programs, names op and fault of broken ones."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from rhino_jax.ir.factor import Factor, FactorKind, Rule, parse_rule
from rhino_jax.ir.program import (
    Input,
    Op,
    Output,
    Program,
    Region,
    RegionCall,
    RegionKind,
    Value,
)
from rhino_jax.ir.verifier import rule_fault, verify


def neg(op_id: int, operand: int, result: int, rank: int = 1) -> Op:
    layout = tuple((d,) for d in range(rank))
    factors = tuple(Factor(name, 4) for name in "ab"[:rank])
    return Op(op_id, "neg", (operand,), (result,), Rule(factors, (layout,), (layout,)))


def program(
    shapes: list[Any],
    ops: tuple[Op, ...],
    body: Region,
    *,
    state_of: int | None = None,
    literals: tuple[int, ...] = (),
) -> Program:
    """Values of these shapes (with dtype "float32", or as pairs)."""
    values = []
    for i, entry in enumerate(shapes):
        is_pair = len(entry) == 2 and isinstance(entry[1], str)
        shape, dtype = entry if is_pair else (entry, "float32")
        values.append(Value(i, shape, dtype, i in literals))
    return Program(
        name="p",
        values=tuple(values),
        ops=ops,
        inputs=tuple(Input(v, f"in{v}") for v in body.inputs),
        outputs=tuple(Output(v, f"out{v}", state_of) for v in body.outputs),
        body=body,
    )


def chain() -> Program:
    """x → neg → neg."""
    ops = (neg(0, 0, 1), neg(1, 1, 2))
    return program([(4,), (4,), (4,)], ops, Region((0,), (0, 1), (2,)), state_of=0)


def calling(call: RegionCall, shapes: list[Any], operands: tuple[int, ...],
            results: tuple[int, ...], inner: tuple[Op, ...]) -> Program:  # fmt: skip
    """One op with regions and what is in them."""
    op = Op(0, "caller", operands, results, None, call=call)
    return program(shapes, (op, *inner), Region(operands, (0,), results))


def scan(**changed: Any) -> Program:
    """carry f32[4], stacked inputs f32[3,4] → carry, stacked f32[3,4]."""
    options: dict[str, Any] = {"num_carry": 1, "trip_count": 3, **changed}
    outputs = options.pop("outputs", (6, 6))
    carry = options.pop("carry", (4,))
    call = RegionCall(RegionKind.SCAN, (Region((4, 5), (1,), outputs),), **options)
    shapes = [(4,), (3, 4), (4,), (3, 4), carry, (4,), (4,)]
    return calling(call, shapes, (0, 1), (2, 3), (neg(1, 5, 6),))


def while_loop(**changed: Any) -> Program:
    """carry f32[4], with a condition that is a literal."""
    options: dict[str, Any] = {"num_carry": 1, **changed}
    cond = Region((2,), (), (3,))
    regions = options.pop("regions", (cond, Region((4,), (1,), (5,))))
    test = options.pop("test", "bool")
    call = RegionCall(RegionKind.WHILE, regions, **options)
    shapes: list[Any] = [(4,), (4,), (4,), ((), test), (4,), (4,)]
    made = calling(call, shapes, (0,), (1,), (neg(1, 4, 5),))
    return with_value(made, 3, is_literal=True)


def cond_of(second: Region) -> Program:
    """Two branches on f32[4]; the index is value 0."""
    call = RegionCall(RegionKind.COND, (Region((3,), (1,), (4,)), second))
    shapes: list[Any] = [((), "int32"), (4,), (4,), (4,), (4,), (4,), (4, 4)]
    return calling(call, shapes, (0, 1), (2,), (neg(1, 3, 4),))


def test_good_programs_pass() -> None:
    verify(chain())
    verify(scan())
    verify(while_loop())
    verify(cond_of(Region((5,), (), (5,))))


def with_op(made: Program, position: int, **changed: Any) -> Program:
    ops = list(made.ops)
    ops[position] = replace(ops[position], **changed)
    return replace(made, ops=tuple(ops))


def with_value(made: Program, position: int, **changed: Any) -> Program:
    values = list(made.values)
    values[position] = replace(values[position], **changed)
    return replace(made, values=tuple(values))


RULE = parse_rule("a -> a", [(4,)], [(4,)])
TWICE = Rule((Factor("a", 4), Factor("a", 4)), (((0,),),), (((1,),),))

BROKEN = {
    "value id": (with_value(chain(), 1, id=7), "value 1: its id is 7"),
    "op id": (with_op(chain(), 1, id=7), "op 1 (neg): its id is 7"),
    "inputs differ": (replace(chain(), inputs=()), "inputs are not those of its body"),
    "outputs differ": (replace(chain(), outputs=()), "outputs are not those"),
    "out of order": (
        replace(chain(), body=Region((0,), (1, 0), (2,))),
        "op 1 stands where op 0 should",
    ),
    "op in no region": (
        replace(chain(), body=Region((0,), (0,), (1,)), outputs=(Output(1, "o"),)),
        "1 ops are in no region",
    ),
    "used before made": (with_op(chain(), 0, operands=(2,)), "op 0 (neg): uses %2"),
    "made twice": (with_op(chain(), 1, results=(1,)), "op 1 (neg): makes %1 a second"),
    "input made again": (with_op(chain(), 0, results=(0,)), "makes %0 a second time"),
    "literal made": (with_value(chain(), 1, is_literal=True), "makes the literal %1"),
    "no such value": (with_op(chain(), 0, operands=(9,)), "there is no value 9"),
    "output never made": (
        replace(with_op(chain(), 1, results=()), body=Region((0,), (0, 1), (2,))),
        "op 1 (neg): its rule has 1 results, the op has 0",
    ),
    "neither rule nor regions": (with_op(chain(), 0, rule=None), "not exactly one"),
    "both rule and regions": (with_op(scan(), 0, rule=RULE), "not exactly one"),
    "rank": (
        with_value(chain(), 0, shape=(4, 1)),
        "op 0 (neg): its rule gives 1 dims to operand 0, which has 2",
    ),
    "size": (
        with_value(chain(), 1, shape=(6,)),
        "op 0 (neg): dim 0 of result 0 has size 6, its factors give 4",
    ),
    "names": (with_op(chain(), 0, rule=TWICE), "factor names are not unique: a a"),
    "state of nothing": (
        replace(chain(), outputs=(Output(2, "o", 3),)),
        "output o: no input 3",
    ),
    "state of another type": (
        with_value(chain(), 0, dtype="int32"),
        "output out2 is not of the type",
    ),
    "scan: carry changes": (scan(carry=(4, 1)), "carry 0 is float32[4, 1] and float"),
    "scan: trip count": (scan(trip_count=5), "not the trip count 5"),
    "scan: too few carries": (scan(num_carry=3), "has fewer than 3 carries"),
    "scan: result missing": (scan(outputs=(6,)), "1 of stacked results outside, 0"),
    "negative trip count": (scan(trip_count=-1), "trip count -1 is negative"),
    "while: number of regions": (
        while_loop(regions=(Region((4,), (1,), (5,)),)),
        "a while has 2 regions, not 1",
    ),
    "while: carries": (while_loop(num_carry=2), "has 1 carries, not 2"),
    "while: condition": (while_loop(test="float32"), "does not give one bool"),
    "while: condition's inputs": (
        while_loop(regions=(Region((), (), (3,)), Region((4,), (1,), (5,)))),
        "1 of condition inputs outside, 0 inside",
    ),
    "cond: branch input": (
        cond_of(Region((6,), (), (6,))),
        "input 0 is float32[4] and",
    ),
    "cond: branch result": (cond_of(Region((5,), (), ())), "1 of results outside, 0"),
    "value from outside": (
        cond_of(Region((5,), (), (1,))),
        "uses %1 before it is made",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_programs_are_refused(name: str) -> None:
    broken, fault = BROKEN[name]
    with pytest.raises(ValueError, match=re.escape(fault)):
        verify(broken)


def test_call_arity() -> None:
    call = RegionCall(RegionKind.CALL, (Region((2,), (1,), (3,)),))
    good = calling(call, [(4,), (4,), (4,), (4,)], (0,), (1,), (neg(1, 2, 3),))
    verify(good)
    with pytest.raises(
        ValueError, match="op 0 .caller.: 1 of inputs outside, 0 inside"
    ):
        bad = RegionCall(RegionKind.CALL, (Region((), (1,), (3,)),))
        verify(with_op(good, 0, call=bad))


@pytest.mark.parametrize(
    ("factor", "size"),
    [
        (Factor("a", 2, FactorKind.HALO), 4),
        (Factor("a", 3, FactorKind.WHOLE), 4),
    ],
)
def test_halo_and_whole_dims_may_have_any_size(factor: Factor, size: int) -> None:
    assert rule_fault(Rule((factor,), (((0,),),), ()), [(size,)], []) is None


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        (
            Rule((Factor("a", 4),), (((1,),),), ()),
            "names a factor that its rule has not",
        ),
        (Rule((Factor("a", 2),), (((0, 0),),), ()), "operand 0 has a factor twice"),
        (Rule((), (), ()), "has 0 operands, the op has 1"),
    ],
)
def test_rule_faults(rule: Rule, fault: str) -> None:
    found = rule_fault(rule, [(4,)], [])
    assert found is not None and fault in found
