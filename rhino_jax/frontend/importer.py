"""Import of a jaxpr as a `Program`.

`region.ops[i]` is `jaxpr.eqns[i]`, in every region, and ops are numbered in the order
of the walk (before the ops of their own regions): a walk over the jaxpr with
`region_kind` and `region_jaxprs` gives the same ops.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
from jax.dtypes import float0

from rhino_jax import _compat
from rhino_jax.errors import RuleError, TraceError
from rhino_jax.frontend.known_values import (
    ASSUMED_TRIP_COUNT,
    fold,
    known_value,
    while_trip_count,
)
from rhino_jax.frontend.manual import manual_of
from rhino_jax.frontend.pallas import (
    estimated_flops,
    kernel_name,
    runs_of_body,
)
from rhino_jax.frontend.provenance import NOWHERE, source_of
from rhino_jax.frontend.regions import (
    REMATS,
    body_jaxpr,
    closed_region_jaxprs,
    entering,
    has_barrier,
    region_jaxprs,
    region_kind,
)
from rhino_jax.frontend.registry import (
    OpContext,
    OpRule,
    label_of,
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

    def entries(what: str, given: Any, expected: int, default: Any) -> Sequence[Any]:
        found = [*map(default, range(expected))] if given is None else given
        if len(found) != expected:
            raise ValueError(
                f"`import_jaxpr`: {what} has {len(found)} entries, the jaxpr {expected}"
            )
        return found

    input_paths = entries("input_paths", input_paths, num_in, "in[{}]".format)
    donated = entries("donated", donated, num_in, lambda i: False)
    output_paths = entries("output_paths", output_paths, num_out, "out[{}]".format)
    state_of = entries("state_of", state_of, num_out, lambda i: None)
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
    return import_jaxpr(jaxpr, name="").flops_of()


Type = tuple[tuple[int, ...], str]
"""Shape and element type."""


def type_of(aval: Any) -> Type:
    """Return shape and element type of an abstract value; tokens are scalars.

    Raises:
      TraceError: a dim is not a number.
    """
    shape = getattr(aval, "shape", ())
    dtype = getattr(aval, "dtype", "token")
    if all(type(d) is int for d in shape):
        return shape if type(shape) is tuple else tuple(shape), _name_of(dtype)
    if not all(isinstance(d, Integral) for d in shape):
        raise TraceError(
            "the program cannot be imported: it has a dim that is not a number.",
            numbers=f"shape {shape}",
            fix="trace the function with concrete shapes, not with symbolic ones.",
        )
    return tuple(int(d) for d in shape), _name_of(dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    return "float0" if dtype == float0 else str(dtype)


Env = dict[Any, int]
"""Variable of one jaxpr → value id; jaxprs may share variables, so each has its own."""


class _ProgramBuilder:
    """The values and ops of a program, while it is built."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op | None] = []
        self.known: dict[int, np.ndarray] = {}  # by value id
        self.types: dict[Type, Type] = {}  # equal types are one object
        self.found: dict[Hashable, tuple[OpRule, bool]] = {}
        self.rules: dict[Rule, Rule] = {}  # equal rules are one object
        self.same: dict[int, tuple[Rule, Rule]] = {}  # id → it, its equal
        self.received: set[Hashable] = set()  # see `with_borders`

    def value(self, aval: Any, *, is_literal: bool = False) -> int:
        found = type_of(aval)
        shape, dtype = self.types.setdefault(found, found)
        kind = is_literal, _compat.is_on_host(aval)
        self.values.append(Value(len(self.values), shape, dtype, *kind))
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
        rule, is_known = (None, True) if call else self.found_rule(eqn)
        manual = manual_of(eqn, source)
        traits = (rule and rule.traits) or traits_of(name)
        if eqn.effects and call is None:
            traits = replace(traits, has_effects=True)
        places = {self.values[v].on_host for v in (*operands, *results)}
        is_transfer = len(places) > 1 and call is None
        if is_transfer:
            traits = replace(traits, is_transfer=True)
        self.ops[op_id] = Op(
            id=op_id,
            name=name,
            operands=operands,
            results=results,
            rule=self.rule(operands, rule) if rule else None,
            flops=float(rule.flops) if rule else 0.0,
            is_fusible=rule is not None and rule.is_fusible and not is_transfer,
            traits=traits,
            is_known=is_known or manual is not None,
            call=call,
            source=source,
            label=label_of(name, eqn.params),
            pin=Pin(**eqn.params) if name == PIN else None,
            manual=manual,
        )
        return op_id

    def found_rule(self, eqn: Any) -> tuple[OpRule, bool]:
        """Return the rule of an equation, and whether a rule is known; equal equations,
        as of unrolled layers, look theirs up once."""
        seen = _seen_of(eqn)
        if seen is None:
            return rule_of(eqn)
        if seen not in self.found:
            self.found[seen] = rule_of(eqn)
        return self.found[seen]

    def rule(self, operands: tuple[int, ...], found: OpRule) -> Rule:
        rule = found.rule
        if found.traits and found.traits.kind is OpKind.CONVOLUTION:
            rule = self.with_borders(operands, rule)
        if id(rule) not in self.same:
            self.same[id(rule)] = rule, self.rules.setdefault(rule, rule)
        return self.same[id(rule)][1]

    def with_borders(self, operands: tuple[int, ...], rule: Rule) -> Rule:
        """Return the rule of a convolution, with the borders marked that shards have
        received from their neighbours for earlier ones.

        The gradient of a convolution with respect to its kernel reads the image as the
        convolution does. XLA sends the borders of a value once, for all ops that read
        the same ones (CPU, v5e:2x4 and 8 H100, jax 0.10.2); twice where a plan shards
        its windows in only one of them, which is rare, and is left out.
        """
        factors, read = list(rule.factors), []
        for dim, held in enumerate(rule.operands[0] if rule.operands else ()):
            f = held[0] if held else None
            if f is None or factors[f].slides_over is None:
                continue
            # The border includes corners, so it depends on the dims before.
            read.append((dim, factors[f].halo))
            border = operands[0], tuple(read)
            if border in self.received:
                factors[f] = replace(factors[f], is_received=True)
            self.received.add(border)
        return replace(rule, factors=tuple(factors)) if read else rule

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
        if kind is not RegionKind.WHILE:
            return RegionCall(kind, regions)
        cond, body = region_jaxprs(eqn)
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        values = [self.known.get(v) for v in operands]
        known = {
            i: x.item() for i, x in enumerate(values) if x is not None and not x.shape
        }
        found = while_trip_count(cond, body, num_cond, num_body, known)
        trip_count, is_known = found or (ASSUMED_TRIP_COUNT, False)
        return RegionCall(
            kind,
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


def _seen_of(eqn: Any) -> Hashable | None:
    """Return a key of everything that rules can see of an equation; None where it has
    none."""
    params = eqn.params
    if any(_compat.is_jaxpr(v) or callable(v) for v in params.values()):
        return None
    ins = tuple(type_of(v.aval) for v in eqn.invars)
    outs = tuple(type_of(v.aval) for v in eqn.outvars)
    seen = eqn.primitive, ins, outs, tuple(params.items())
    try:
        hash(seen)
    except TypeError:
        return None
    return seen


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
    body = body_jaxpr(eqn.params)
    return 0.0 if body is None else jaxpr_flops(body) * runs_of_body(eqn)
