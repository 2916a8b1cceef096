"""Import of a jaxpr as a `Program`.

`region.ops[i]` is `jaxpr.eqns[i]`, in every region, and ops are numbered in the order
of the walk (before the ops of their own regions): a walk over the jaxpr with
`region_kind` and `region_jaxprs` gives the same ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rhino_jax import _compat
from rhino_jax.errors import RuleError
from rhino_jax.frontend.found_rules import Borders, FoundRules, Type, type_of
from rhino_jax.frontend.known_values import (
    ASSUMED_TRIP_COUNT,
    fold,
    known_value,
    while_trip_count,
)
from rhino_jax.frontend.manual import manual_of
from rhino_jax.frontend.pallas import (
    estimated_flops,
    hidden_body,
    kernel_name,
    runs_of_body,
)
from rhino_jax.frontend.provenance import NOWHERE, label_of, source_of
from rhino_jax.frontend.regions import (
    REMATS,
    closed_region_jaxprs,
    entering,
    has_barrier,
    region_jaxprs,
    region_kind,
)
from rhino_jax.frontend.registry import (
    OpContext,
    OpRule,
    lookup,
    lookup_user,
    traits_of,
)
from rhino_jax.frontend.rules.opaque import unsharded_rule
from rhino_jax.ir.factor import Rule
from rhino_jax.ir.places import with_while_trips
from rhino_jax.ir.printer import format_type
from rhino_jax.ir.program import (
    PIN,
    Input,
    Op,
    Output,
    Pin,
    Program,
    Region,
    RegionCall,
    RegionKind,
    Source,
    Value,
    WhileTrips,
)
from rhino_jax.ir.traits import OpKind
from rhino_jax.ir.verifier import rule_fault
from rhino_jax.utils.keywords import brief


def import_jaxpr(
    closed_jaxpr: Any,
    *,
    name: str,
    input_paths: Sequence[str] | None = None,
    donated: Sequence[bool] | None = None,
    output_paths: Sequence[str] | None = None,
    state_of: Sequence[int | None] | None = None,
    captured_paths: Sequence[str] = (),
    while_trips: WhileTrips = (),
) -> Program:
    """Import a whole function.

    Args:
      closed_jaxpr: as `jax.make_jaxpr` or `jax.jit(f).trace(...).jaxpr` return it.
      name: the function's name.
      input_paths, donated: tree path, and whether its memory may be reused, of every
        argument; None: `in[i]`, not reused.
      output_paths, state_of: tree path, and position of the argument that it replaces
        in the next call (or None), of every result; None: `out[i]`, none replaced.
      captured_paths: names of the last constants; the others are called `const[i]`.
      while_trips: as in `Program`.

    Returns:
      The program; its inputs are the arguments, then captured constants.

    Raises:
      ValueError: a sequence does not have one entry per argument or result.
      TraceError: the program has dims that are not numbers.
      RuleError: a rule that the user registered does not fit.
    """
    jaxpr = _compat.open_jaxpr(closed_jaxpr)
    num_in, num_out = len(jaxpr.invars), len(jaxpr.outvars)
    if input_paths is None:
        input_paths = [f"in[{i}]" for i in range(num_in)]
    if output_paths is None:
        output_paths = [f"out[{i}]" for i in range(num_out)]
    donated = [False] * num_in if donated is None else donated
    state_of = [None] * num_out if state_of is None else state_of
    for what, given, expected in (
        ("input_paths", len(input_paths), num_in),
        ("donated", len(donated), num_in),
        ("output_paths", len(output_paths), num_out),
        ("state_of", len(state_of), num_out),
    ):
        if given != expected:
            raise ValueError(
                f"`import_jaxpr`: {what} has {given} entries, the jaxpr {expected}"
            )
    builder = _ProgramBuilder()
    arguments = tuple(builder.value(v.aval) for v in jaxpr.invars)
    consts = tuple(builder.value(v.aval) for v in jaxpr.constvars)
    inputs = [
        Input(value, path, bool(gone))
        for value, path, gone in zip(arguments, input_paths, donated, strict=True)
    ]
    named = len(consts) - len(captured_paths)
    for i, value in enumerate(consts):
        path = f"const[{i}] {format_type(builder.values[value])}"
        if i >= named:
            path = captured_paths[i - named]
        is_replaced = len(arguments) + i in state_of
        inputs.append(Input(value, path, is_donated=is_replaced, is_const=True))
    env = dict(
        zip((*jaxpr.invars, *jaxpr.constvars), (*arguments, *consts), strict=True)
    )
    body = builder.region(jaxpr, env, (*arguments, *consts), NOWHERE)
    program = Program(
        name=name,
        values=tuple(builder.values),
        ops=tuple(op for op in builder.ops if op is not None),
        inputs=tuple(inputs),
        outputs=tuple(
            Output(*entry)
            for entry in zip(body.outputs, output_paths, state_of, strict=True)
        ),
        body=body,
    )
    return with_while_trips(program, while_trips)


def jaxpr_flops(jaxpr: Any) -> float:
    """Return the floating-point operations of one run of a sub-jaxpr."""
    program = import_jaxpr(jaxpr, name="")
    return sum(op.flops * count for op, count in program.walk())


Env = dict[Any, int]
"""Variable of one jaxpr → value id; jaxprs may share variables, so each has its own."""


class _ProgramBuilder:
    """The values and ops of a program, while it is built."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op | None] = []
        self.known: dict[int, np.ndarray] = {}  # by value id
        self.types: dict[Type, Type] = {}  # equal types are one object
        self.rules, self.borders = FoundRules(rule_of), Borders()

    def value(self, aval: Any, *, is_literal: bool = False) -> int:
        found = type_of(aval)
        shape, dtype = self.types.setdefault(found, found)
        self.values.append(Value(len(self.values), shape, dtype, is_literal))
        return len(self.values) - 1

    def atom(self, env: Env, atom: Any) -> int:
        """Return the value id of an operand; each literal gets a new value."""
        if not _compat.is_literal(atom):
            return env[atom]
        value = self.value(atom.aval, is_literal=True)
        known = known_value(atom, {})
        if known is not None:
            self.known[value] = known
        return value

    def region(
        self, jaxpr: Any, env: Env, inputs: tuple[int, ...], outer: Source
    ) -> Region:
        """Add all equations of a jaxpr, whose inputs are in `env`, and return the
        region."""
        ops = tuple(self.op(eqn, env, outer) for eqn in jaxpr.eqns)
        return Region(inputs, ops, tuple(self.atom(env, v) for v in jaxpr.outvars))

    def op(self, eqn: Any, env: Env, outer: Source) -> int:
        op_id = len(self.ops)
        self.ops.append(None)  # it is numbered before the ops of its regions
        operands = tuple(self.atom(env, v) for v in eqn.invars)
        results = tuple(self.value(v.aval) for v in eqn.outvars)
        env.update(
            (var, value)
            for var, value in zip(eqn.outvars, results, strict=True)
            if not _compat.is_drop_var(var)
        )
        name = eqn.primitive.name
        known = fold(eqn, [self.known.get(v) for v in operands])
        if known is not None:
            self.known[results[0]] = known
        source = source_of(eqn.source_info, outer)
        call = self.call(eqn, operands, source)
        if call is not None and call.kind is RegionKind.CALL:
            for made, inner in zip(results, call.regions[0].outputs, strict=False):
                if inner in self.known:
                    self.known[made] = self.known[inner]
        rule, is_known = (None, True) if call else self.rules.of(eqn)
        manual = manual_of(eqn, source)
        traits = (rule and rule.traits) or traits_of(name)
        if eqn.effects and call is None:
            traits = replace(traits, has_effects=True)
        self.ops[op_id] = Op(
            id=op_id,
            name=name,
            operands=operands,
            results=results,
            rule=self.rule(operands, rule) if rule else None,
            flops=float(rule.flops) if rule else 0.0,
            is_fusible=rule.is_fusible if rule else False,
            traits=traits,
            is_known=is_known or manual is not None,
            call=call,
            source=source,
            label=label_of(name, eqn.params),
            pin=Pin(**eqn.params) if name == PIN else None,
            manual=manual,
        )
        return op_id

    def rule(self, operands: tuple[int, ...], found: OpRule) -> Rule:
        rule = found.rule
        if found.traits and found.traits.kind is OpKind.CONVOLUTION:
            rule = self.borders.of(operands, rule)
        return self.rules.one(rule)

    def call(
        self, eqn: Any, operands: tuple[int, ...], source: Source
    ) -> RegionCall | None:
        kind, params = region_kind(eqn), eqn.params
        if kind is None:
            return None
        regions = tuple(
            self.enter(body, same, source)
            for body, same in zip(
                closed_region_jaxprs(eqn), entering(eqn, operands), strict=True
            )
        )
        if kind is RegionKind.CALL:
            is_remat = eqn.primitive.name in REMATS
            is_apart = is_remat and has_barrier(params)
            return RegionCall(kind, regions, is_remat=is_remat, is_apart=is_apart)
        if kind is RegionKind.SCAN:
            num_consts, num_carry = _compat.scan_counts(params)
            return RegionCall(
                kind,
                regions,
                num_consts=num_consts,
                num_carry=num_carry,
                trip_count=int(params["length"]),
            )
        if kind is RegionKind.WHILE:
            return self.while_call(eqn, operands, regions)
        return RegionCall(kind, regions)

    def while_call(
        self, eqn: Any, operands: tuple[int, ...], regions: tuple[Region, ...]
    ) -> RegionCall:
        cond, body = region_jaxprs(eqn)
        num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        values = [self.known.get(v) for v in operands]
        known = {
            i: x.item() for i, x in enumerate(values) if x is not None and not x.shape
        }
        found = while_trip_count(cond, body, num_cond, num_body, known)
        trip_count, is_known = found or (ASSUMED_TRIP_COUNT, False)
        return RegionCall(
            RegionKind.WHILE,
            regions,
            num_consts=num_body,
            num_cond_consts=num_cond,
            num_carry=len(operands) - num_cond - num_body,
            trip_count=trip_count,
            is_trip_count_known=is_known,
            max_trip_count=trip_count if found and not is_known else None,
        )

    def enter(self, body: Any, same: Sequence[int], source: Source) -> Region:
        """Add a region.

        Args:
          body: its jaxpr, closed where it has constants.
          same: outer values that its first inputs are equal to in every run.
        """
        jaxpr = _compat.open_jaxpr(body)
        inputs = tuple(self.value(v.aval) for v in jaxpr.invars)
        for inner, outer in zip(inputs, same, strict=False):
            if outer in self.known:
                self.known[inner] = self.known[outer]
        env: Env = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            env[var] = self.value(var.aval, is_literal=True)
        return self.region(jaxpr, env, inputs, source)


def rule_of(eqn: Any) -> tuple[OpRule, bool]:
    """Return the factors of a plain op, and whether a rule gave them.

    Raises:
      RuleError: the rule does not fit the op's shapes.
    """
    ins = [type_of(v.aval) for v in eqn.invars]
    outs = [type_of(v.aval) for v in eqn.outvars]
    ctx = OpContext(
        primitive=eqn.primitive.name,
        in_shapes=tuple(shape for shape, _ in ins),
        in_dtypes=tuple(dtype for _, dtype in ins),
        out_shapes=tuple(shape for shape, _ in outs),
        out_dtypes=tuple(dtype for _, dtype in outs),
        params=eqn.params,
    )
    kernel = kernel_name(eqn)
    rule_fn = lookup_user(kernel) if kernel else None
    rule_fn = rule_fn or lookup(ctx.primitive)
    if rule_fn is None:
        return OpRule(
            unsharded_rule(ctx.in_shapes, ctx.out_shapes), _body_flops(eqn)
        ), False
    found = rule_fn(ctx)
    if not isinstance(found, OpRule) or not isinstance(found.rule, Rule):
        raise RuleError(
            f"the rule of `{kernel or ctx.primitive}` gives no rhino.OpRule.",
            where=str(source_of(eqn.source_info)),
            numbers=f"got {brief(found)} ({type(found).__name__})",
            fix="return rhino.OpRule(rule), or register a text: 'b s, s d -> b d'.",
        )
    fault = rule_fault(found.rule, ctx.in_shapes, ctx.out_shapes)
    if fault is not None:
        raise RuleError(
            f"the rule of `{kernel or ctx.primitive}` does not fit this call: {fault}.",
            where=str(source_of(eqn.source_info)),
            numbers=f"operands {ctx.in_shapes}, results {ctx.out_shapes}",
            fix="give every operand and result one entry per dim, in the op's order.",
        )
    if found.traits is None:
        found = replace(found, traits=traits_of(ctx.primitive, kernel))
    is_kernel = traits_of(ctx.primitive).kind is OpKind.KERNEL
    if is_kernel and rule_fn is lookup(ctx.primitive):
        return replace(found, flops=_body_flops(eqn)), bool(found.rule.factors)
    return found, True


def _body_flops(eqn: Any) -> float:
    """Return the FLOPs of an opaque op, over all runs of its body."""
    estimate = estimated_flops(eqn)
    if estimate is not None:
        return estimate
    body = hidden_body(eqn)
    return 0.0 if body is None else jaxpr_flops(body) * runs_of_body(eqn)
