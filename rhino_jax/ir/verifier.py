"""The verifier: checks the invariants of the IR."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Op, Program, Region, RegionCall, RegionKind, Value


Shapes = Sequence[Sequence[int]]


def verify(program: Program) -> None:
    """Check that a program is well formed.

    Values are defined once and before their uses, in the region of the uses; rules fit
    shapes; regions have the inputs and results that their kind demands.

    Raises:
      ValueError: an invariant is violated; the message names the op and the fault.
    """
    for i, value in enumerate(program.values):
        _check(value.id == i, f"value {i}: its id is {value.id}")
    for i, op in enumerate(program.ops):
        _check(op.id == i, f"op {i} ({op.name}): its id is {op.id}")
    _VerifierWalk(program).run()


def _check(holds: bool, fault: str) -> None:
    if not holds:
        raise ValueError(f"program is not valid: {fault}")


class _VerifierWalk:
    """A walk over all regions that tracks which values are defined."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made: set[int] = set()
        self.next_op = 0

    def run(self) -> None:
        program = self.program
        inputs = tuple(entry.value for entry in program.inputs)
        _check(inputs == program.body.inputs, "inputs are not those of its body")
        outputs = tuple(entry.value for entry in program.outputs)
        _check(outputs == program.body.outputs, "outputs are not those of its body")
        self.region(program.body, "the body")
        unused = len(program.ops) - self.next_op
        _check(unused == 0, f"{unused} ops are in no region")
        for out in program.outputs:
            if out.state_of is None:
                continue
            has_input = 0 <= out.state_of < len(inputs)
            _check(has_input, f"output {out.path}: no input {out.state_of}")
            old = self.value(inputs[out.state_of])
            _check(
                _same_type(self.value(out.value), old),
                f"output {out.path} is not of the type of the input it replaces",
            )

    def value(self, value: int) -> Value:
        _check(0 <= value < len(self.program.values), f"there is no value {value}")
        return self.program.values[value]

    def region(self, region: Region, where: str) -> None:
        scope: set[int] = set()
        for value in region.inputs:
            self.define(value, scope, f"input of {where}")
        for op_id in region.ops:
            _check(
                op_id == self.next_op,
                f"{where}: op {op_id} stands where op {self.next_op} should"
                " (ops are numbered as they are met)",
            )
            self.next_op += 1
            self.op(self.program.ops[op_id], scope)
        for value in region.outputs:
            self.use(value, scope, f"output of {where}")

    def op(self, op: Op, scope: set[int]) -> None:
        where = f"op {op.id} ({op.name})"
        for value in op.operands:
            self.use(value, scope, where)
        _check(
            (op.rule is None) != (op.call is None),
            f"{where}: has not exactly one of rule and regions",
        )
        if op.rule is not None:
            ins = [self.value(v).shape for v in op.operands]
            outs = [self.value(v).shape for v in op.results]
            fault = rule_fault(op.rule, ins, outs)
            _check(fault is None, f"{where}: {fault}")
        if op.call is not None:
            operands = [self.value(v) for v in op.operands]
            results = [self.value(v) for v in op.results]
            for fault in self.call_faults(op.call, operands, results):
                _check(False, f"{where}: {fault}")
            for i, region in enumerate(op.call.regions):
                self.region(region, f"region {i} of {where}")
        for value in op.results:
            self.define(value, scope, where)

    def define(self, value: int, scope: set[int], where: str) -> None:
        entry = self.value(value)
        _check(not entry.is_literal, f"{where}: makes the literal %{value}")
        _check(value not in self.made, f"{where}: makes %{value} a second time")
        self.made.add(value)
        scope.add(value)

    def use(self, value: int, scope: set[int], where: str) -> None:
        is_there = self.value(value).is_literal or value in scope
        _check(is_there, f"{where}: uses %{value} before it is made or from outside")

    def call_faults(
        self, call: RegionCall, operands: list[Value], results: list[Value]
    ) -> Iterator[str]:
        """Yield the mismatches between an op's operands and results and its regions."""
        sides = [
            ([self.value(v) for v in r.inputs], [self.value(v) for v in r.outputs])
            for r in call.regions
        ]
        expected = {RegionKind.CALL: 1, RegionKind.SCAN: 1, RegionKind.WHILE: 2}
        count = expected.get(call.kind, max(len(sides), 1))
        if len(sides) != count:
            yield f"a {call.kind.value} has {count} regions, not {len(sides)}"
        elif call.trip_count < 0:
            yield f"trip count {call.trip_count} is negative"
        elif call.kind is RegionKind.CALL:
            yield from _mismatch("input", operands, sides[0][0])
            yield from _mismatch("result", results, sides[0][1])
        elif call.kind is RegionKind.COND:
            for inputs, outputs in sides:
                yield from _mismatch("input", operands[1:], inputs)
                yield from _mismatch("result", results, outputs)
        elif call.kind is RegionKind.SCAN:
            yield from _scan_faults(call, operands, results, *sides[0])
        else:
            yield from _while_faults(call, operands, results, sides)


def _scan_faults(
    call: RegionCall,
    operands: list[Value],
    results: list[Value],
    inputs: list[Value],
    outputs: list[Value],
) -> Iterator[str]:
    first, carries = call.first_slice, call.carries(inputs)
    if len(carries) != call.num_carry or len(outputs) < call.num_carry:
        yield f"has fewer than {call.num_carry} carries"
        return
    yield from _mismatch("carry", carries, outputs[: call.num_carry])
    yield from _mismatch("const or carry", operands[:first], inputs[:first])
    yield from _mismatch("carry result", results[: call.num_carry], carries)
    for what, outer, inner in (
        ("stacked input", operands[first:], inputs[first:]),
        ("stacked result", call.stacked(results), call.stacked(outputs)),
    ):
        if len(outer) != len(inner):
            yield f"{len(outer)} of {what}s outside, {len(inner)} inside"
        for i, (out, own) in enumerate(zip(outer, inner, strict=False)):
            if out.shape != (call.trip_count, *own.shape):
                yield (
                    f"{what} {i} has shape {out.shape}, not the trip count"
                    f" {call.trip_count} and then {own.shape}"
                )


def _while_faults(
    call: RegionCall,
    operands: list[Value],
    results: list[Value],
    sides: list[tuple[list[Value], list[Value]]],
) -> Iterator[str]:
    (cond_inputs, cond_outputs), (body_inputs, body_outputs) = sides
    first_carry = call.num_cond_consts + call.num_consts
    cond_consts, carries = operands[: call.num_cond_consts], operands[first_carry:]
    if len(carries) != call.num_carry:
        yield f"has {len(carries)} carries, not {call.num_carry}"
    if len(cond_outputs) != 1 or cond_outputs[0].dtype != "bool":
        yield "the condition does not give one bool"
    yield from _mismatch("condition input", [*cond_consts, *carries], cond_inputs)
    yield from _mismatch("body input", operands[call.num_cond_consts :], body_inputs)
    yield from _mismatch("carry", carries, body_outputs)
    yield from _mismatch("result", results, carries)


def _mismatch(
    what: str, outer: Sequence[Value], inner: Sequence[Value]
) -> Iterator[str]:
    if len(outer) != len(inner):
        yield f"{len(outer)} of {what}s outside, {len(inner)} inside"
    for i, (a, b) in enumerate(zip(outer, inner, strict=False)):
        if not _same_type(a, b):
            yield f"{what} {i} is {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"


def _same_type(a: Value, b: Value) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def rule_fault(rule: Rule, in_shapes: Shapes, out_shapes: Shapes) -> str | None:
    """Return why a rule does not fit these shapes; None where it fits.

    As in `parse_rule`, a dim with a HALO or WHOLE factor may have any size, and so may
    one without factors.
    """
    names = [factor.name for factor in rule.factors]
    if len(set(names)) != len(names):
        return f"factor names are not unique: {' '.join(names)}"
    for what, layouts, shapes in (
        ("operand", rule.operands, in_shapes),
        ("result", rule.results, out_shapes),
    ):
        if len(layouts) != len(shapes):
            return f"its rule has {len(layouts)} {what}s, the op has {len(shapes)}"
        for i, (layout, shape) in enumerate(zip(layouts, shapes, strict=True)):
            if len(layout) != len(shape):
                return (
                    f"its rule gives {len(layout)} dims to {what} {i},"
                    f" which has {len(shape)}"
                )
            used = [f for dim in layout for f in dim]
            if any(not 0 <= f < len(rule.factors) for f in used):
                return f"{what} {i} names a factor that its rule has not"
            if len(set(used)) != len(used):
                return f"{what} {i} has a factor twice"
            for d, (dim, size) in enumerate(zip(layout, shape, strict=True)):
                fault = _dim_fault(rule, dim, size)
                if fault is not None:
                    return f"dim {d} of {what} {i} {fault}"
    return None


def _dim_fault(rule: Rule, dim: Sequence[int], size: int) -> str | None:
    factors = [rule.factors[f] for f in dim]
    exempt = (FactorKind.HALO, FactorKind.WHOLE)
    if not factors or any(factor.kind in exempt for factor in factors):
        return None
    product = math.prod(factor.size for factor in factors)
    return None if product == size else f"has size {size}, its factors give {product}"
