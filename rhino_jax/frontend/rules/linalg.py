"""Fourier transforms and dense linear algebra: batch dims are parallel.

FLOP counts are those of the textbook algorithms for an m × n matrix.

Source: G. Golub, C. Van Loan, Matrix Computations, 4th ed., 2013, chapters 3 to 8.
"""

from __future__ import annotations

import math
from dataclasses import replace

from jax import lax

from rhino_jax.frontend.registry import OpContext, OpRule, by_name, register
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.ir.factor import Dim, Rule
from rhino_jax.ir.traits import Library, OpKind, Traits


# XLA's partitioner gathers the batch of LU, eigh, SVD and of solves by them for TPU,
# and the right-hand sides of a triangular solve everywhere (jax 0.12.0.1, libtpu
# 0.0.52, v5e:2x4 and 8 H100): each device runs its own part under `shard_map`.
_ON_SHARDS = Traits(OpKind.OTHER, is_gathered=True)
_FACTORING = replace(_ON_SHARDS, library=Library("factoring"))

CUBIC_COEFFICIENTS = by_name(
    {
        1 / 3: "cholesky",
        2 / 3: "lu",
        4 / 3: "qr geqrf geqp3 householder_product tridiagonal",
        10 / 3: "hessenberg",
        9.0: "eigh",
        21.0: "svd",
        25.0: "eig schur",
    }
)
"""FLOPs of a factorisation, divided by m · n · min(m, n)."""

PRODUCT_COEFFICIENTS = by_name({
    1.0: "triangular_solve", 2.0: "symmetric_product cholesky_update", 4.0: "ormqr"
})  # fmt: skip
"""FLOPs, divided by (columns of the first operand) · (elements of the last)."""


@register("fft", traits=_ON_SHARDS)
def fft(ctx: OpContext) -> OpRule:
    """Return the rule: transformed dims are whole; 5 n log2 n FLOPs per complex
    transform."""
    (shape,) = ctx.in_shapes
    lengths = ctx.params["fft_lengths"]
    points = math.prod(lengths)
    batch_rank = len(shape) - len(lengths)
    flops = math.prod(shape[:batch_rank]) * 5.0 * points * math.log2(max(points, 2))
    # The inverse real transform destroys its operand: XLA:GPU copies it first.
    passes = len(lengths) + (ctx.params["fft_type"] == lax.FftType.IRFFT)
    traits = replace(_ON_SHARDS, library=Library("fourier", passes))
    return OpRule(_batched(ctx, batch_rank), flops, traits=traits)


@register(*CUBIC_COEFFICIENTS, traits=_FACTORING)
def factorisation(ctx: OpContext) -> OpRule:
    """Return the rule of a factorisation of the matrices in the last two dims of the
    first operand."""
    *batch, rows, columns = ctx.in_shapes[0]
    flops = CUBIC_COEFFICIENTS[ctx.primitive] * rows * columns * min(rows, columns)
    return OpRule(_batched(ctx, len(batch)), math.prod(batch) * flops)


@register(
    *PRODUCT_COEFFICIENTS,
    traits=lambda name: replace(
        _FACTORING, linear=((1,),) if name == "triangular_solve" else ()
    ),
)
def matrix_product(ctx: OpContext) -> OpRule:
    """Return the rule of solves and products of the first operand's columns with the
    last operand."""
    *batch, _, columns = ctx.in_shapes[0]
    flops = PRODUCT_COEFFICIENTS[ctx.primitive] * columns
    flops *= math.prod(ctx.in_shapes[-1])
    if ctx.primitive == "triangular_solve":
        return OpRule(_right_hand_sides(ctx, len(batch)), flops)
    return OpRule(_batched(ctx, len(batch)), flops)


@register("tridiagonal_solve", "lu_pivots_to_permutation", traits=_ON_SHARDS)
def vector_core(ctx: OpContext) -> OpRule:
    """Return the rule of ops whose first operand has a single dim that is no batch
    dim."""
    flops = 8.0 * math.prod(ctx.out_shapes[0])
    return OpRule(_batched(ctx, len(ctx.in_shapes[0]) - 1), flops)


def _right_hand_sides(ctx: OpContext, batch_rank: int) -> Rule:
    """Return the rule in which batch dims are parallel, and columns of `b` as well
    (rows, for a solve from the right)."""
    factors = FactorList()
    matrix, sides = ctx.in_shapes
    batch = factors.dims(matrix[:batch_rank])
    last = factors.dims(sides[batch_rank:], (0 if ctx.params["left_side"] else 1,))
    corner = [factors.whole(size) for size in matrix[batch_rank:]]
    result = [*batch, *last]
    return factors.rule([[*batch, *corner], result], [result])


def _batched(ctx: OpContext, batch_rank: int) -> Rule:
    """Return the rule in which the leading `batch_rank` dims of all operands and
    results are parallel."""
    factors = FactorList()
    batch = factors.dims(ctx.in_shapes[0][:batch_rank])

    def layout(shape: tuple[int, ...]) -> list[Dim]:
        return batch + [factors.whole(size) for size in shape[batch_rank:]]

    operands = [layout(shape) for shape in ctx.in_shapes]
    results = [[*batch, *([()] * (len(s) - batch_rank))] for s in ctx.out_shapes]
    return factors.rule(operands, results)
