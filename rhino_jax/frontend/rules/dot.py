"""Matrix products of any dimension numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jax import lax

from rhino_jax.frontend.registry import OpContext, OpRule, numbers, register
from rhino_jax.frontend.rules.opaque import unsharded
from rhino_jax.ir.factor import parse_rule
from rhino_jax.ir.traits import EITHER, OpKind, Traits


def _label(params: Mapping[str, Any]) -> str:
    (lhs, rhs), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    text = f"contract {numbers(lhs)} with {numbers(rhs)}"
    if lhs_batch:
        text += f", batch {numbers(lhs_batch)} with {numbers(rhs_batch)}"
    return text


_PRODUCT = Traits(
    OpKind.CONTRACTION, hosts_fusion=True, masks_padding=True, linear=EITHER
)


_VECTORS = replace(_PRODUCT, hosts_fusion=False, fuses_operands=True)


@register("dot_general", traits=_PRODUCT, label=_label)
def dot_general(ctx: OpContext) -> OpRule:
    """Return the rule: batch `b`, left `m`, right `n`, contracted `k`; two FLOPs per
    multiply-add.

    A product that contracts nothing, as `jnp.einsum` makes of three operands, is a
    multiplication of broadcasts, and fuses as one; a product of vectors, as `jnp.vdot`,
    is a multiplication and a sum, and fuses as that. Source: XLA's `HandleDot` in
    xla/hlo/transforms/simplifiers/algebraic_simplifier.cc (checked on v5e, libtpu
    0.0.52, and h100, jax 0.10.2).
    """
    (contract, batch) = ctx.params["dimension_numbers"]
    lhs, rhs = (
        dot_names(len(shape), contract[side], batch[side], free)
        for side, (shape, free) in enumerate(
            zip(ctx.in_shapes, ("m", "n"), strict=True)
        )
    )
    free = [n for n in lhs if n[0] == "m"] + [n for n in rhs if n[0] == "n"]
    out = [lhs[d] for d in batch[0]] + free
    text = ", ".join(" ".join(names) or "·" for names in (lhs, rhs))
    rule = parse_rule(
        f"{text} -> {' '.join(out) or '·'}", ctx.in_shapes, ctx.out_shapes
    )
    products = float(math.prod(f.size for f in rule.factors))
    if not contract[0]:
        traits = Traits(linear=EITHER)
        return OpRule(rule, products, is_fusible=True, traits=traits)
    traits = replace(_PRODUCT, is_rounded=is_rounded(ctx))
    if not free:
        traits = replace(_VECTORS, is_rounded=is_rounded(ctx))
    return OpRule(rule, 2.0 * products, traits=traits)


def is_rounded(ctx: OpContext) -> bool:
    """Whether a product is at JAX's default precision (`jax.lax.Precision`)."""
    precision = ctx.params["precision"]
    each = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, lax.Precision.DEFAULT) for p in each)


def dot_names(
    rank: int,
    contract: Sequence[int],
    batch: Sequence[int],
    free: str,
    groups: Sequence[int] = (),
) -> list[str]:
    """Return the names of one operand's dims; numbered where there are several of a
    kind."""
    taken = {*contract, *batch, *groups}
    rest = [d for d in range(rank) if d not in taken]
    names = ["g"] * rank
    for dims, letter in ((batch, "b"), (contract, "k"), (rest, free)):
        for i, d in enumerate(dims):
            names[d] = letter if len(dims) == 1 else f"{letter}{i}"
    return names


RAGGED_DOTS = "ragged_dot_general", "ragged_dot"
"""The primitive's names in the versions of JAX."""

_TILED = ("bfloat16", "float16", "float32")


class TiledDims(NamedTuple):
    """The dims of a grouped matmul that `rhino_jax.runtime.grouped` can run.

    Attributes:
      lhs: the first operand's dims: batch, others of sets of rows, rows, columns.
      rhs: the second operand's: batch, groups, and the two of a matrix; or, of
        matrices, as the first operand's.
      batch: number of batch dims.
      of_matrices: whether the rows are contracted: there is a result per matrix.
      is_turned: whether the second operand is contracted over its last dim.
    """

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    batch: int
    of_matrices: bool
    is_turned: bool


def tiled_dims(
    params: Mapping[str, Any], lhs_rank: int, rhs_rank: int
) -> TiledDims | None:
    """Return the dims of a grouped matmul; None where the kernel does not cover it.

    Args:
      params: parameters of the equation.
      lhs_rank, rhs_rank: number of dims of its operands.
    """
    dims = params["ragged_dot_dimension_numbers"]
    ((left, right), batch) = dims.dot_dimension_numbers
    (rows,), groups = dims.lhs_ragged_dimensions, tuple(dims.rhs_group_dimensions)
    free = [d for d in range(lhs_rank) if d not in {*left, *batch[0]}]
    taken = {*right, *batch[1], *groups}
    others = [d for d in range(rhs_rank) if d not in taken]
    of_matrices = not groups
    before, last = (left, free) if of_matrices else (free, left)
    if len(last) != 1 or len(others) != 1 or rows not in before[-1:]:
        return None
    lhs = (*batch[0], *before, *last)
    if of_matrices:
        rhs, is_turned = (*batch[1], *right, *others), False
    else:
        rhs = (*batch[1], *groups, *sorted((*right, *others)))
        is_turned = rhs[-1] == right[0]
    if lhs[-2:] != (lhs_rank - 2, lhs_rank - 1):
        return None
    return TiledDims(lhs, rhs, len(batch[0]), of_matrices, is_turned)


def prefix_dims(dims: Any) -> list[int]:
    """Return the dims of a grouped matmul's first operand along which group sizes may
    differ: batch dims, and those of its rows' kind before the rows
    (`jax.lax.ragged_dot_general`, "[b..., x..., g]").

    Args:
      dims: its `RaggedDotDimensionNumbers`.
    """
    (contract, _), (batch, _) = dims.dot_dimension_numbers
    (ragged,) = dims.lhs_ragged_dimensions
    if ragged in contract:
        return [*batch, *contract[: contract.index(ragged)]]
    before = (d for d in range(ragged) if d not in (*contract, *batch))
    return [*batch, *before]


@register(*RAGGED_DOTS, traits=Traits(OpKind.CONTRACTION, linear=EITHER))
def ragged_dot(ctx: OpContext) -> OpRule:
    """Return the rule of a grouped matmul: rows in groups, each with its own matrix.

    Rows are INDEX: each shard has the groups, and the parts of groups, that fall into
    it; where they are contracted, the results are partial. The group dim is whole.
    FLOPs are those of every row with its group's matrix; the work that some compilers
    add is described by the traits. Group sizes may differ along `prefix_dims`.
    """
    dims = ctx.params["ragged_dot_dimension_numbers"]
    contract, batch = dims.dot_dimension_numbers
    (ragged,) = dims.lhs_ragged_dimensions
    groups = tuple(dims.rhs_group_dimensions)
    if len(ctx.in_shapes) != 3 or ragged in batch[0]:
        return unsharded(ctx)
    lhs = dot_names(len(ctx.in_shapes[0]), contract[0], batch[0], "m")
    rhs = dot_names(len(ctx.in_shapes[1]), contract[1], batch[1], "n", groups)
    free = [n for n in lhs if n[0] == "m"] + [n for n in rhs if n[0] == "n"]
    out = [lhs[d] for d in batch[0]] + free
    if not groups:
        out = ["g", *out]
    marked = lhs[ragged]

    def text(names: Sequence[str]) -> str:
        marks = {"g": "!", marked: "@"}
        parts = [n + marks.get(n, "") for n in names]
        return " ".join(parts) or "·"

    *outer, count = ctx.in_shapes[2]
    sizes = [lhs[d] for d in prefix_dims(dims)] if outer else []
    rule = parse_rule(
        f"{text(lhs)}, {text(rhs)}, {text([*sizes, 'g'])} -> {text(out)}",
        ctx.in_shapes,
        ctx.out_shapes,
    )
    flops = 2.0 * math.prod(f.size for f in rule.factors if f.name != "g")
    return OpRule(
        rule,
        flops,
        traits=Traits(
            OpKind.CONTRACTION,
            linear=EITHER,
            is_gathered=True,
            groups=count,
            masked=(0,) if groups else (0, 1),
            is_turned=bool(groups) and contract[1][-1:] == (len(ctx.in_shapes[1]) - 1,),
            is_tiled=_is_tiled(ctx),
        ),
    )


def _is_tiled(ctx: OpContext) -> bool:
    """Whether `rhino_jax.runtime.grouped` runs a grouped matmul of several groups."""
    types, shapes = {*ctx.in_dtypes[:2]}, ctx.in_shapes
    return (
        len(types) == 1
        and shapes[2][-1] > 1
        and {*types, *ctx.out_dtypes} <= {*_TILED}
        and all(math.prod(shape) for shape in shapes)
        and tiled_dims(ctx.params, len(shapes[0]), len(shapes[1])) is not None
    )
