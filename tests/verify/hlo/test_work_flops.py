"""FLOPs read of compiled programs against their closed forms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhino_jax.verify.hlo.module import Module, parse_module
from rhino_jax.verify.hlo.work import InstructionWork, ProgramWork, WorkReader


HLO = Path(__file__).parent


def _weight(work: InstructionWork) -> float:
    return float(work.flops + work.bytes)


def _read(module: Module) -> ProgramWork:
    return WorkReader(module, _weight).program()


def _recorded(name: str) -> ProgramWork:
    return _read(parse_module((HLO / f"{name}.hlo").read_text()))


CONV_GRADS = 3 * 2 * 4 * (32 * 32 * 64 * 9 * 16 + 15 * 15 * 32 * 16 * 64)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        # 3 x 4 trips.
        ("work_tpu_scans", 12 * 2 * 128 * 512 * 512),
        # Dots with two batch dims, written as convolutions over dilated inputs: two
        # in the forward pass, four in the backward pass.
        ("work_tpu_batched", 6 * 2 * 16 * 256 * 256 * 64),
        # A kernel that states its own cost.
        ("work_tpu_kernel", 2 * (8 + 7) * 128 * 512 * 256),
        ("work_tpu_conv_grad", 3 * 2 * 4 * 32 * 32 * 128 * 9 * 16),
        ("work_tpu_embedding", 3 * 2 * 128 * 512 * 512),
        ("work_gpu_cache", 512 * 2 * 2 * 4 * 512 * 512),
        # cuDNN calls for the convolutions and both of their gradients.
        ("work_gpu_conv_grad", CONV_GRADS),
        # Two dots forward, the same two again, and four gradients.
        ("work_gpu_remat", 6 * 8 * 2 * 128 * 512 * 512),
    ],
)
def test_flops_of_recorded_programs(name: str, flops: int) -> None:
    assert _recorded(name).flops == flops


Args = tuple[tuple[int, ...], ...]


def _compiled(fn: Callable[..., Any], shapes: Args, dtype: Any) -> ProgramWork:
    """The work of one of 8 devices; the first argument is cut over all of them."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    specs = [PartitionSpec("x"), *[PartitionSpec()] * (len(shapes) - 1)]
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    text = jax.jit(fn).lower(*args).compile().as_text()
    return _read(parse_module(text or ""))


def _conv(x: jax.Array, w: jax.Array, stride: int = 1, **how: Any) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        how.pop("padding", "VALID"),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        **how,
    )


def _chain(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.tanh(x @ a) @ b


def _scanned(x: jax.Array, w: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda c, m: (jnp.tanh(jnp.sin(c @ m[0]) @ m[1]), None))
    return jnp.sum(lax.scan(layer, x, w)[0])


def _nested(x: jax.Array, w: jax.Array) -> jax.Array:
    def inner(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(c @ w), None

    def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return lax.scan(inner, c, None, length=4)

    return lax.scan(outer, x, None, length=3)[0]


def _batched(a: jax.Array, b: jax.Array) -> jax.Array:
    """Two batch dims of the three, and two contracted dims, in mixed order."""
    return jnp.einsum("xamcd,acdn->xamn", a, b)


def _conv_loss(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.sum(_conv(jnp.tanh(_conv(x, w)), v, 2) ** 2)


def _switch(x: jax.Array, w: jax.Array) -> jax.Array:
    branches = [
        lambda x: x @ w[:, :512],
        lambda x: jnp.tanh(x @ w) @ w.T,
        lambda x: 2 * x,
    ]
    return lax.switch(jnp.int32(x[0, 0]), branches, x)


@pytest.mark.parametrize(
    ("fn", "shapes", "flops"),
    [
        (_chain, ((1024, 512), (512, 768), (768, 256)),
         2 * 128 * (512 * 768 + 768 * 256)),
        (jax.grad(_scanned, argnums=1), ((1024, 512), (6, 2, 512, 512)),
         6 * 8 * 2 * 128 * 512 * 512),
        (_nested, ((1024, 512), (512, 512)), 12 * 2 * 128 * 512 * 512),
        (_batched, ((16, 3, 32, 8, 24), (3, 8, 24, 40)),
         2 * 2 * 3 * 32 * 40 * 8 * 24),
        (jax.grad(_conv_loss, argnums=(0, 1, 2)),
         ((32, 34, 34, 16), (3, 3, 16, 64), (4, 4, 64, 32)), CONV_GRADS),
        (lambda x, w: _conv(x, w, rhs_dilation=(2, 2)),
         ((32, 36, 36, 64), (3, 3, 64, 128)), 2 * 4 * 32 * 32 * 128 * 9 * 64),
        (lambda x, w: _conv(x, w, feature_group_count=64),
         ((32, 34, 34, 64), (3, 3, 1, 64)), 2 * 4 * 32 * 32 * 64 * 9),
        # The branch that costs most.
        (_switch, ((1024, 512), (512, 1024)), 2 * 2 * 128 * 512 * 1024),
    ],
    ids=["chain", "remat", "nested", "batched", "conv-grad", "dilated", "depthwise",
         "switch"],
)  # fmt: skip
def test_flops_of_programs_compiled_here(
    fn: Callable[..., Any], shapes: Args, flops: int
) -> None:
    assert _compiled(fn, shapes, jnp.float32).flops == flops


def test_taps_on_padding_do_not_count() -> None:
    work = _compiled(
        lambda x, w: _conv(x, w, padding="SAME"),
        ((8, 5, 7, 2), (3, 3, 2, 4)),
        jnp.float32,
    )
    # Of 3 taps at each of n positions, the outermost two positions lack one each.
    assert work.flops == 2 * 4 * 2 * (3 * 5 - 2) * (3 * 7 - 2)


MODULE = """HloModule m, is_scheduled=true

ENTRY %main (a: {lhs}, b: {rhs}) -> {result} {{
  %a = {lhs} parameter(0)
  %b = {rhs} parameter(1)
  ROOT %r = {result} {call}
}}
"""


def _one(lhs: str, rhs: str, result: str, call: str) -> InstructionWork:
    text = MODULE.format(lhs=lhs, rhs=rhs, result=result, call=call)
    (work,) = _read(parse_module(text)).items
    return work


def test_rows_of_ragged_groups_count_once_where_others_are_skipped() -> None:
    """As libtpu 0.0.52 says it: its estimate of cycles counts all groups."""
    config = (
        'backend_config={"estimated_cycles":"139357","is_ragged_dot":true,'
        '"num_groups_in_ragged_dot":"4","iteration_skipper_mode":'
        '"ITERATION_SKIPPER_MODE_GROUP_STARTS"}'
    )
    product = "dot(%a, %b), lhs_contracting_dims={2}, rhs_contracting_dims={1}, "
    batch = "lhs_batch_dims={0}, rhs_batch_dims={0}, "
    ends = "bf16[4,16,8]", "bf16[4,8,32]", "bf16[4,16,32]"
    work = _one(*ends, product + batch + config)
    assert work.flops == 2 * 16 * 8 * 32
    assert work.cycles is None
    every = _one(*ends, product + batch + config.replace("GROUP_STARTS", "NONE"))
    assert every.flops == 4 * work.flops
    assert every.cycles == 139357


def _windows() -> Iterator[tuple[int, ...]]:
    """Inputs, kernel, outputs, stride, both dilations and both paddings."""
    for inputs, kernel, stride, (of_lhs, of_rhs), (low, high) in itertools.product(
        (1, 4, 7), (1, 3), (1, 3), ((1, 1), (2, 1), (3, 2)), ((0, 0), (2, 1), (3, -1))
    ):
        extent = (inputs - 1) * of_lhs + 1 + low + high
        outputs = (extent - (kernel - 1) * of_rhs - 1) // stride + 1
        if outputs > 0:
            yield inputs, kernel, outputs, stride, of_lhs, of_rhs, low, high


def test_taps_against_enumeration() -> None:
    for inputs, kernel, outputs, stride, of_lhs, of_rhs, low, high in _windows():
        there = {low + i * of_lhs for i in range(inputs)}
        met = sum(
            o * stride + k * of_rhs in there
            for o, k in itertools.product(range(outputs), range(kernel))
        )
        window = (
            f"size={kernel} stride={stride} pad={low}_{high}"
            f" lhs_dilate={of_lhs} rhs_dilate={of_rhs}"
        )
        work = _one(
            f"f32[2,{inputs},6]{{2,1,0}}",
            f"f32[{kernel},6,5]{{2,1,0}}",
            f"f32[2,{outputs},5]{{2,1,0}}",
            f"convolution(%a, %b), window={{{window}}}, dim_labels=b0f_0io->b0f",
        )
        assert work.flops == 2 * 2 * 6 * 5 * met, window


def test_groups_of_a_convolution() -> None:
    shapes = "f32[8,9,12]{2,1,0}", "f32[3,4,6]{2,1,0}", "f32[8,7,6]{2,1,0}"
    how = "window={size=3}, dim_labels=b0f_0io->b0f"
    grouped = _one(*shapes, f"convolution(%a, %b), {how}, feature_group_count=3")
    assert grouped.flops == 2 * 8 * 7 * 6 * 3 * 4
    shapes = "f32[8,9,4]{2,1,0}", "f32[3,4,6]{2,1,0}", "f32[4,7,6]{2,1,0}"
    grouped = _one(*shapes, f"convolution(%a, %b), {how}, batch_group_count=2")
    assert grouped.flops == 2 * 4 * 7 * 6 * 3 * 4


def test_a_cublas_call() -> None:
    numbers = (
        '"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
        '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],'
        '"rhs_batch_dimensions":["0"]}'
    )
    work = _one(
        "bf16[4,64,32]{2,1,0}",
        "bf16[4,32,16]{2,1,0}",
        "(bf16[4,64,16]{2,1,0}, s8[4194304]{0})",
        'custom-call(%a, %b), custom_call_target="__cublas$lt$matmul",'
        f' backend_config={{"gemm_backend_config":{{{numbers}}}}}',
    )
    assert work.flops == 2 * 4 * 64 * 16 * 32
    assert work.dtype == "bfloat16"
    # The second array of the result is scratch.
    assert work.bytes == 2 * 4 * (64 * 32 + 32 * 16 + 64 * 16)


@pytest.mark.parametrize(
    ("lhs", "rhs", "dtype"),
    [
        ("bf16", "bf16", "bfloat16"),
        ("f8e4m3fn", "f8e5m2", "float8_e4m3fn"),
        ("s8", "s8", "int8"),
        ("bf16", "f32", "float32"),
        ("f16", "f16", "float16"),
        ("c64", "c64", "complex64"),
    ],
)
def test_element_types_are_named_as_jax_names_them(
    lhs: str, rhs: str, dtype: str
) -> None:
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    work = _one(
        f"{lhs}[8,4]{{1,0}}",
        f"{rhs}[4,2]{{1,0}}",
        "f32[8,2]{1,0}",
        f"dot(%a, %b), {dims}",
    )
    assert (work.flops, work.dtype) == (2 * math.prod((8, 4, 2)), dtype)
