"""Attention in one kernel, of cuDNN and of JAX for TPU: on shards, and as compiled."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
    splash_attention_mask as masks,
)

import rhino_jax as rhino
from tests.runtime.stand_in import normal
from tests.verify.extras import skipped_without_extra


def step_of(implementation: str, heads: int, **options: Any) -> Any:
    """A step of two layers of attention; keys and values have half as many heads."""

    def layer(weights: Any, x: jax.Array) -> jax.Array:
        q, k, v = (
            (x @ w).reshape(*x.shape[:2], n, -1)
            for w, n in zip(weights, (heads, heads // 2, heads // 2), strict=False)
        )
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=implementation, **options
        )
        return x + out.reshape(*x.shape[:2], -1) @ weights[3]

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            y = x
            for weights in params:
                y = layer(weights, y)
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), value

    return step


def arguments(rows: int, length: int, heads: int, width: int) -> Any:
    inner = width * heads
    sizes = (inner, inner), (inner, inner // 2), (inner, inner // 2), (inner, inner)
    params = [
        tuple(
            (normal(4 * i + k, *s) / inner**0.5).astype(jnp.bfloat16)
            for k, s in enumerate(sizes)
        )
        for i in range(2)
    ]
    return params, normal(100, rows, length, inner).astype(jnp.bfloat16)


def plan_of(
    args: Any, mesh: Any, hardware: str = "h100:8", **options: Any
) -> rhino.Plan:
    step = step_of("cudnn", 8)
    return rhino.plan(step, *args, mesh=mesh, hardware=hardware, **options)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"data": 4, "model": 2}, {}),
        pytest.param({"data": 2}, {"microbatches": 4}, marks=pytest.mark.slow),
        pytest.param(
            {"stage": 2, "data": 2}, {"microbatches": 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_steps_are_those_of_plain_attention(mesh: Any, options: Any) -> None:
    args = arguments(8, 32, 8, 16)
    got = plan_of(args, mesh, **options).jit(step_of("cudnn", 8))(*args)
    want = jax.jit(step_of("xla", 8))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), atol=4e-3
        )


def test_scores_are_in_neither_memory_nor_time() -> None:
    args = jax.eval_shape(lambda: arguments(8, 1024, 8, 64))
    plan = plan_of(args, {"model": 4})
    plain = rhino.plan(step_of("xla", 8), *args, mesh={"model": 4}, hardware="h100:8")
    # Scores of 64 MiB a layer, in three element types and two passes, are not there.
    assert plan.predicted.peak_bytes < 0.5 * plain.predicted.peak_bytes
    assert plan.predicted.step_time_s < plain.predicted.step_time_s


def test_a_plan_is_checked_where_the_library_is_not() -> None:
    args = arguments(8, 32, 8, 16)
    assert plan_of(args, {"data": 4, "model": 2}).check(step_of("cudnn", 8), *args).ok


@pytest.mark.slow
@pytest.mark.compile_only
def test_compiled_for_hardware_that_is_not_here_kernels_cost_what_was_predicted() -> (
    None
):
    args = jax.eval_shape(lambda: arguments(16, 2048, 16, 64))
    step = step_of("cudnn", 16)
    plan = rhino.plan(step, *args, mesh={"data": 4, "model": 2}, hardware="h100:8")
    with skipped_without_extra():
        read = plan.verify(step, *args)
    # The kernels' FLOPs are read from what XLA calls, and predicted from the program.
    assert re.search(r"FLOPs +.* 1.0[01]x", read.table())
    ratio = read.predicted.step_time_s / read.compiled.step_time_s
    print(f"predicted {ratio:.2f} of compiled")
    assert 0.85 < ratio < 1.25


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    length, heads = q.shape[2], q.shape[1]
    causal = masks.CausalMask((length, length))
    mask = masks.MultiHeadMask([causal] * heads)
    kernel = kernels.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(q, k, v)


@pytest.mark.slow
@pytest.mark.compile_only
@pytest.mark.parametrize("attention", [splash, partial(flash_attention, causal=True)])
def test_kernels_that_jax_ships_for_tpu_compile_as_planned(attention: Any) -> None:
    """Sharded over their grids' axes: batch and heads."""

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            q, k, v = (jnp.einsum("btd,dnh->bnth", x, weights[n]) for n in "qkv")
            out = jnp.einsum("bnth,nhd->btd", attention(q, k, v), weights["o"])
            return jnp.mean(jnp.square(out.astype(jnp.float32)))

        gradients = jax.grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g, weights, gradients)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    weights = dict.fromkeys("qkv", array(1024, 8, 128)) | {"o": array(8, 128, 1024)}
    args = weights, array(16, 1024, 1024)
    plan = rhino.plan(step, *args, mesh={"data": 4, "model": 4}, hardware="v5e:4x4")
    with skipped_without_extra():
        read = plan.verify(step, *args)
    ratio = read.predicted.step_time_s / read.compiled.step_time_s
    print(f"predicted {ratio:.2f} of compiled")
    assert read.ok and read.wire_bytes == pytest.approx(read.planned_wire_bytes)
    assert 0.8 < ratio < 1.25
