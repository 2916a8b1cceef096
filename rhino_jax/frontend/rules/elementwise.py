"""Elementwise ops: all their operands are sharded alike.

Collectives over a named axis, in the body of manually partitioned code (`shard_map`),
combine elements at the same position: sharding here is along other axes of the mesh.
The bytes that they send do not follow from factors: see `rhino_jax.frontend.manual`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from rhino_jax.frontend.registry import OpContext, OpRule, by_name, register
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.frontend.rules.opaque import unsharded, unsharded_rule
from rhino_jax.ir.factor import Rule
from rhino_jax.ir.op import item_bytes
from rhino_jax.ir.traits import EITHER, FROM_ALL, OpKind, Traits


_OPS = """
abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj
convert_element_type cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor imag
integer_pow is_finite lgamma log log1p log2 logistic neg not one_minus_square
population_count real reduce_precision round rsqrt sign sin sinh sqrt square tan tanh

add add_any and atan2 complex div eq eq_to ge gt igamma igamma_grad_a igammac le le_to
lt lt_to max min mul mulhi ne nextafter or polygamma pow random_gamma_grad rem
shift_left shift_right_arithmetic shift_right_logical sub xor zeta

clamp philox2x32 philox4x32 polynomial random_clone random_fold_in random_seed
regularized_incomplete_beta select_n threefry2x32 threefry4x32
""".split()
"""Ops of one operand, of two, and of any number."""

_COMPARISONS = by_name({
    "==": "eq eq_to", ">=": "ge", ">": "gt", "<=": "le le_to", "<": "lt lt_to",
    "!=": "ne",
})  # fmt: skip
"""Primitive → the comparison that it is."""

_REDUCERS = by_name({
    "sum": "add add_any", "and": "and", "max": "max", "min": "min", "prod": "mul",
    "or": "or",
})  # fmt: skip
"""Primitive → how it combines two operands."""

_LINEAR = by_name(
    {
        ((0,),): "conj imag neg real div",
        ((0, 1),): "add add_any complex sub",
        EITHER: "mul",
    }
)

_ZEROS = by_name(
    {
        (
            (0,),
        ): """abs asin asinh atan atanh cbrt ceil erf expm1 floor log1p round sign sin
        sinh sqrt square tan tanh""",
        ((0, 1),): "max min or xor",
        EITHER: "and",
    }
)

_LIMITS = by_name({-1.0: "erf tanh", 0.0: "exp exp2 logistic"})

_BOUNDED = "cos erf logistic sin tanh".split()

COTANGENT_SUM = "add_any"
"""The op by which differentiation adds up cotangents."""

ANNOTATIONS = frozenset({"mesh_cast", "reshard", "sharding_constraint"})
"""Ops with which a program itself states how a value is sharded."""

_PLACING = {
    *ANNOTATIONS,
    *"device_put layout_constraint relayout with_memory_space_constraint".split(),
}
"""Ops with which it states how, or where, a value is stored."""

_PASSING = """
copy copy_p device_put layout_constraint name optimization_barrier pbroadcast pvary
reduced_vary_cast reduced_vary_cast_p relayout reshard sharding_constraint stage
stop_gradient with_memory_space_constraint
""".split()

_KINDS = by_name(
    {
        OpKind.CONVERSION: "convert_element_type",
        OpKind.IDENTITY: "reduce_precision",
        OpKind.EXPONENTIAL: "exp exp2",
    }
)

_EXPENSIVE = """
acos asin atan atan2 cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 lgamma log
log1p logistic pow sin sinh tan tanh threefry2x32
""".split()
"""Ops that XLA's `IsExpensive` names."""

_VECTOR_OPS = by_name({
    2.0: "convert_element_type integer_pow round",
    10.0: "div rsqrt sqrt exp exp2",
    20.0: "log cbrt expm1 log1p logistic rem",
    40.0: "tanh erf cos sin tan atan2",
    90.0: "pow", 95.0: "erfc", 75.0: "erf_inv", 235.0: "lgamma", 350.0: "digamma",
})  # fmt: skip
"""`Traits.vector_ops` of ops other than 1: those of the HLO ops that they become, see
`rhino_jax.verify.hlo.instruction_cost`; pow and the last four become many (HLO of h100,
jax 0.10.2)."""


@functools.cache
def _traits(name: str) -> Traits:
    return Traits(
        _KINDS.get(name, OpKind.ELEMENTWISE),
        vector_ops=_VECTOR_OPS.get(name, 1.0),
        is_expensive=name in _EXPENSIVE,
        moves=((1, ...),) if name == "select_n" else (),
        linear=_LINEAR.get(name, ()),
        zeros=_ZEROS.get(name, ()),
        reducer="sum" if name == "sub" else _REDUCERS.get(name, ""),
        accumulates=(0,) if name == "sub" else (0, 1) if name in _REDUCERS else (),
        compares=_COMPARISONS.get(name, ""),
        limit=_LIMITS.get(name),
        is_bounded=name in _BOUNDED,
    )


def _label(params: Mapping[str, Any]) -> str:
    """Return the element type of a conversion, or the exponent of a power."""
    if "new_dtype" in params:
        return str(params["new_dtype"])
    return f"power {params['y']}" if "y" in params else ""


@register(*_OPS, traits=_traits, label=_label)
def elementwise(ctx: OpContext) -> OpRule:
    """Return the rule, with one FLOP per element and result; scalars and dims of size
    one are broadcast."""
    flops = float(sum(math.prod(shape) for shape in ctx.out_shapes))
    rule = aligned_rule(ctx.in_shapes, ctx.out_shapes)
    return OpRule(rule, flops, is_fusible=True, traits=_traits_of_call(ctx))


def _traits_of_call(ctx: OpContext) -> Traits | None:
    """Return the traits that depend on types and parameters; None: there are none."""
    traits = _traits(ctx.primitive)
    if traits.kind is OpKind.CONVERSION and _is_exact(*ctx.in_dtypes, *ctx.out_dtypes):
        return replace(traits, moves=((0,),))
    if ctx.primitive == "div" and "int" in ctx.in_dtypes[0]:
        return replace(traits, linear=())
    if ctx.primitive == "integer_pow" and ctx.params["y"] > 0:
        return replace(traits, zeros=((0,),))
    return None


def _is_exact(before: str, after: str) -> bool:
    """Whether a conversion leaves of sums, and of numbers to be counted, all that is
    needed."""
    if before == after or "bool" in (before, after):
        return before == after
    if "float" in before and "float" in after:
        old, new = jnp.finfo(before), jnp.finfo(after)
        return bool(new.nmant >= old.nmant and new.maxexp >= old.maxexp)
    is_widening = item_bytes(after) >= item_bytes(before)
    return is_widening and not ("float" in before and "int" in after)


@register("tie", traits=Traits(OpKind.IDENTITY, moves=((1,),)))
def tie(ctx: OpContext) -> OpRule:
    """Return the rule of `tie`: its second operand, available once the first is."""
    (first, second), factors = ctx.in_shapes, FactorList()
    layout = factors.dims(second)
    return OpRule(factors.rule([[()] * len(first), layout], [layout]), is_fusible=True)


def _label_of_annotation(params: Mapping[str, Any]) -> str:
    """Return the spec of a sharding constraint, or the name that a value is given."""
    spec = getattr(params.get("sharding"), "spec", None)
    if spec is not None:
        return str(spec).replace("PartitionSpec", "P", 1)
    name = params.get("name")
    return "" if name is None else str(name)


@register(
    *_PASSING,
    traits=lambda name: Traits(
        OpKind.IDENTITY, moves=FROM_ALL, states_placement=name in _PLACING
    ),
    label=_label_of_annotation,
)
def passing(ctx: OpContext) -> OpRule:
    """Return the rule of ops whose results are their operands: constraints, copies,
    barriers over many values."""
    if ctx.in_shapes != ctx.out_shapes:
        return unsharded(ctx)
    factors = FactorList()
    layouts = [factors.dims(shape) for shape in ctx.in_shapes]
    return OpRule(factors.rule(layouts, layouts), is_fusible=True)


@register("random_wrap", "random_unwrap", traits=Traits(OpKind.IDENTITY))
@register("bitcast_convert_type", traits=Traits(OpKind.MOVEMENT))
def reinterpreted(ctx: OpContext) -> OpRule:
    """Return the rule: a change of width, and the words of a key, add or drop last
    dims, which are whole."""
    (operand_shape,), (result_shape,) = ctx.in_shapes, ctx.out_shapes
    factors = FactorList()
    rank = min(len(operand_shape), len(result_shape))
    kept = factors.dims(operand_shape[:rank])
    operand, result = (
        kept + [factors.whole(size) for size in shape[rank:]]
        for shape in (operand_shape, result_shape)
    )
    return OpRule(factors.rule([operand], [result]), is_fusible=True)


@functools.lru_cache(maxsize=4096)
def aligned_rule(
    in_shapes: tuple[tuple[int, ...], ...], out_shapes: tuple[tuple[int, ...], ...]
) -> Rule:
    """Return the rule of operands that are broadcast against each other."""
    shape, every = out_shapes[0], (*in_shapes, *out_shapes)
    for each in every:
        fits = all(s in (1, full) for s, full in zip(each, shape, strict=False))
        if not fits or len(each) not in (0, len(shape)):
            return unsharded_rule(in_shapes, out_shapes)
    factors = FactorList()
    dims = factors.dims(shape)
    layouts = [
        [d if s != 1 else () for d, s in zip(dims, each, strict=False)]
        for each in every
    ]
    return factors.rule(layouts[: len(in_shapes)], layouts[len(in_shapes) :])


@register(
    "ppermute",
    traits=Traits(OpKind.MOVEMENT),
    label=lambda params: ", ".join(f"{a} → {b}" for a, b in params["perm"]),
)
@register("psum", "psum_invariant", "pmax", "pmin", traits=Traits(OpKind.OTHER))
def in_place(ctx: OpContext) -> OpRule:
    """Return the rule of ops that combine, or move, elements at the same position on
    all devices."""
    return replace(passing(ctx), is_fusible=False)
