"""Elementwise ops: all their operands are sharded alike."""

from __future__ import annotations

import functools
import math

from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.frontend.rules.opaque import uncut, uncut_rule
from rhino_jax.ir.factor import Dim, Rule
from rhino_jax.ir.traits import OpKind, Traits


UNARY = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clz", "conj", "convert_element_type", "cos",
    "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor",
    "imag", "integer_pow", "is_finite", "lgamma", "log", "log1p", "log2",
    "logistic", "neg", "not", "one_minus_square", "population_count", "real",
    "reduce_precision", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square",
    "tan", "tanh",
)  # fmt: skip

BINARY = (
    "add", "add_any", "and", "atan2", "complex", "div", "eq", "eq_to", "ge", "gt",
    "igamma", "igamma_grad_a", "igammac", "le", "le_to", "lt", "lt_to", "max", "min",
    "mul", "mulhi", "ne", "nextafter", "or", "polygamma", "pow",
    "random_gamma_grad", "rem", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sub", "xor", "zeta",
)  # fmt: skip

NARY = (
    "clamp", "philox2x32", "philox4x32", "polynomial", "random_clone",
    "random_fold_in", "random_seed", "regularized_incomplete_beta", "select_n",
    "threefry2x32", "threefry4x32",
)  # fmt: skip

EXPONENTIAL = ("exp", "exp2")

ANNOTATIONS = frozenset({"mesh_cast", "reshard", "sharding_constraint"})
"""Ops with which a program itself states how a value is sharded."""

PASSING = (
    "copy", "copy_p", "device_put", "layout_constraint", "name",
    "optimization_barrier", "pbroadcast", "pvary", "reduced_vary_cast",
    "reduced_vary_cast_p", "relayout", "reshard", "sharding_constraint", "stage",
    "stop_gradient", "with_memory_space_constraint",
)  # fmt: skip


EXPENSIVE = (
    "acos", "asin", "atan", "atan2", "cbrt", "cos", "cosh", "digamma", "erf", "erf_inv",
    "erfc", "expm1", "lgamma", "log", "log1p", "logistic", "pow", "sin", "sinh", "tan",
    "tanh", "threefry2x32",
)  # fmt: skip
"""Ops that XLA's `IsExpensive` names, in addition to the exponentials."""


@register(
    *{*UNARY, *BINARY, *NARY}.difference(
        EXPENSIVE, EXPONENTIAL, ("convert_element_type", "reduce_precision")
    ),
    traits=Traits(OpKind.ELEMENTWISE),
)
@register(*EXPENSIVE, traits=Traits(OpKind.ELEMENTWISE, is_expensive=True))
@register(*EXPONENTIAL, traits=Traits(OpKind.EXPONENTIAL, is_expensive=True))
@register("reduce_precision", traits=Traits(OpKind.IDENTITY))
@register("convert_element_type", traits=Traits(OpKind.CONVERSION))
def elementwise(ctx: OpContext) -> OpRule:
    """Return the rule, with one FLOP per element and result; scalars and dims of size
    one are broadcast."""
    flops = float(sum(math.prod(shape) for shape in ctx.out_shapes))
    return OpRule(aligned_rule(ctx.in_shapes, ctx.out_shapes), flops, is_fusible=True)


@register("tie", traits=Traits(OpKind.IDENTITY))
def tie(ctx: OpContext) -> OpRule:
    """Return the rule of `tie`: its second operand, available once the first is."""
    (first, second), factors = ctx.in_shapes, FactorList()
    layout = [factors.parallel(size) for size in second]
    return OpRule(factors.rule([[()] * len(first), layout], [layout]), is_fusible=True)


@register(*PASSING, traits=Traits(OpKind.IDENTITY))
def passing(ctx: OpContext) -> OpRule:
    """Return the rule of ops whose results are their operands: constraints, copies,
    barriers over many values."""
    if ctx.in_shapes != ctx.out_shapes:
        return uncut(ctx)
    factors = FactorList()
    layouts = [[factors.parallel(size) for size in shape] for shape in ctx.in_shapes]
    return OpRule(factors.rule(layouts, layouts), is_fusible=True)


@register("bitcast_convert_type", traits=Traits(OpKind.MOVEMENT))
def bitcast_convert_type(ctx: OpContext) -> OpRule:
    """Return the rule: a change of width adds or drops a last dim, which is whole."""
    (operand_shape,), (result_shape,) = ctx.in_shapes, ctx.out_shapes
    factors = FactorList()
    rank = min(len(operand_shape), len(result_shape))
    kept: list[Dim] = [factors.parallel(size) for size in operand_shape[:rank]]
    operand = kept + [factors.whole(size) for size in operand_shape[rank:]]
    result = kept + [factors.whole(size) for size in result_shape[rank:]]
    return OpRule(factors.rule([operand], [result]), is_fusible=True)


@functools.lru_cache(maxsize=4096)
def aligned_rule(
    in_shapes: tuple[tuple[int, ...], ...], out_shapes: tuple[tuple[int, ...], ...]
) -> Rule:
    """Return the rule of operands that are broadcast against each other."""
    shape = out_shapes[0]
    factors = FactorList()
    dims: list[Dim] = [factors.parallel(size) for size in shape]

    def layout(of: tuple[int, ...]) -> list[Dim] | None:
        if not of:
            return []
        if len(of) != len(shape):
            return None
        fits = all(s in (1, full) for s, full in zip(of, shape, strict=True))
        return (
            [d if s != 1 else () for d, s in zip(dims, of, strict=True)]
            if fits
            else None
        )

    layouts = [layout(of) for of in (*in_shapes, *out_shapes)]
    known = [lay for lay in layouts if lay is not None]
    if len(known) != len(layouts):
        return uncut_rule(in_shapes, out_shapes)
    return factors.rule(known[: len(in_shapes)], known[len(in_shapes) :])
