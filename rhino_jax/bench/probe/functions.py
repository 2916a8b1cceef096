"""Functions of one to four ops, by family of ops.

A family is a file of `frontend/rules`, whose ops its functions contain; `mixed` are the
layers that models are made of. `tests/bench/test_probe.py` holds that no family is
missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedFunction:
    """A function of few ops, with the arrays that it is called with.

    Attributes:
      family: family of ops.
      name: what it computes.
      fn: the function.
      args: shape of each argument, and its dtype, None for that of the variation. The
        first dim of the first one is a batch.
    """

    family: str
    name: str
    fn: Callable[..., Any]
    args: tuple[tuple[tuple[int, ...], str | None], ...]


def probed_functions() -> tuple[ProbedFunction, ...]:
    """Return all functions, those of a family one after the other."""
    return tuple(
        ProbedFunction(
            family=family, name=name, fn=fn, args=tuple(map(_array, args.split()))
        )
        for family, found in _FAMILIES.items()
        for name, (fn, args) in found.items()
    )


def _array(text: str) -> tuple[tuple[int, ...], str | None]:
    """Parse `int32[64,8]`, or `[64,8]` without a type."""
    dtype, _, dims = text.rstrip("]").partition("[")
    return tuple(int(n) for n in dims.split(",") if n), dtype or None


def _conv(
    strides: int = 1, padding: Any = "SAME", dilation: int = 1, groups: int = 1
) -> Callable[..., jax.Array]:
    layouts = {3: "NWC WIO NWC", 4: "NHWC HWIO NHWC", 5: "NDHWC DHWIO NDHWC"}

    def fn(x: Any, w: Any) -> jax.Array:
        rank = x.ndim - 2
        numbers: Any = tuple(layouts[x.ndim].split())
        return lax.conv_general_dilated(
            x, w, (strides,) * rank, padding, rhs_dilation=(dilation,) * rank,
            dimension_numbers=numbers, feature_group_count=groups,
        )  # fmt: skip

    return fn


def _transposed_conv(x: Any, w: Any) -> jax.Array:
    return lax.conv_transpose(x, w, (2, 2), "SAME")


def _attention(is_causal: bool) -> Callable[..., jax.Array]:
    def fn(q: Any, k: Any, v: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)

    return fn


def _cudnn(q: Any, k: Any, v: Any) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _written_out(q: Any, k: Any, v: Any) -> jax.Array:
    scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32)
    weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5)
    return jnp.einsum("bhst,bthd->bshd", weights.astype(q.dtype), v)


def _layer_norm(x: Any, scale: Any) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def _rms_norm(x: Any, scale: Any) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def _batch_norm(x: Any, scale: Any) -> jax.Array:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * scale)


def _rotary(x: Any) -> jax.Array:
    a, b = jnp.split(x, 2, -1)
    angles = jnp.outer(jnp.arange(x.shape[1]), jnp.ones(a.shape[-1]) / 7)[:, None]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _stencil(x: Any) -> jax.Array:
    return jnp.roll(x, 1, 1) + jnp.roll(x, -1, 1) - 2 * x


def _heads(x: Any) -> jax.Array:
    return x.reshape(*x.shape[:-1], 8, -1).swapaxes(1, 2)


def _blocks(x: Any) -> jax.Array:
    b, h, w, c = x.shape
    y = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
    return y.reshape(b, h // 2, w // 2, 4 * c)


def _dropout(x: Any, key: Any) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, x.shape)
    return jnp.where(keep, x / 0.9, 0)


def _noise(x: Any, key: Any) -> jax.Array:
    key = jax.random.wrap_key_data(key)
    return x + jax.random.normal(key, x.shape, x.dtype)


def _grouped(x: Any, w: Any, sizes: Any) -> jax.Array:
    return lax.ragged_dot(x, w, sizes)


def _gated(x: Any, gate: Any, up: Any, down: Any) -> jax.Array:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def _cross_entropy(x: Any, w: Any, labels: Any) -> jax.Array:
    logits = (x @ w).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return jax.nn.logsumexp(logits, -1) - picked


def _power(x: Any) -> jax.Array:
    def body(_: Any, v: jax.Array) -> jax.Array:
        v = jnp.einsum("bij,bj->bi", x, v)
        return v * lax.rsqrt((v * v).sum(-1, keepdims=True) + 1e-6)

    return lax.fori_loop(0, 8, body, x[:, 0])


def _until(x: Any) -> jax.Array:
    def is_large(v: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(v)) > 1e-3

    return lax.while_loop(is_large, lambda v: 0.5 * jnp.tanh(v), x)


def _clipped(x: Any) -> jax.Array:
    norm = jnp.sqrt(jnp.sum(x.astype(jnp.float32) ** 2)).astype(x.dtype)
    return lax.cond(norm > 1, lambda x: x / norm, lambda x: x, x)


def _definite(x: Any) -> jax.Array:
    return x @ x.mT + 8 * jnp.eye(x.shape[-1], dtype=x.dtype)


def _solved(x: Any, b: Any) -> jax.Array:
    return lax.linalg.triangular_solve(_definite(x), b, left_side=True, lower=True)


def _convolved_by_fft(x: Any) -> jax.Array:
    spectrum = jnp.fft.rfft(x, axis=-1)
    return jnp.fft.irfft(spectrum * spectrum, n=x.shape[-1], axis=-1)


def _segment_sum(x: Any, of: Any) -> jax.Array:
    return jax.ops.segment_sum(x, of, num_segments=4096)


def _pooled(x: Any) -> jax.Array:
    window = (1, 2, 2, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


def _written(x: Any, rows: Any, i: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, rows, i, 1)


ON_GPUS = ("cudnn attention",)
"""Names of the programs that no TPU runs."""

_FAMILIES: Mapping[str, Mapping[str, tuple[Callable[..., Any], str]]] = {
    "dot": {
        "matmul": (lambda x, w: x @ w, "[65536,1024] [1024,4096]"),
        "matmul of a transposed weight":
            (lambda x, w: x @ w.T,
             "[65536,1024] [4096,1024]"),
        "thin matmul": (lambda x, w: x @ w, "[65536,2048] [2048,64]"),
        "matmuls of a batch": (lambda x, y: x @ y, "[1024,256,512] [1024,512,256]"),
        "matrix and vector": (lambda x, v: x @ v, "[65536,4096] [4096]"),
        "einsum of three":
            (lambda x, y, w: jnp.einsum("bi,bj,ijk->bk", x, y, w),
             "[16384,32] [16384,64] [32,64,256]"),
        "grouped matmul": (_grouped, "[65536,512] [16,512,1024] int32[16]"),
    },
    "attention": {
        "attention":
            (_attention(False),
             "[32,1024,8,128] [32,1024,8,128] [32,1024,8,128]"),
        "causal attention":
            (_attention(True),
             "[32,1024,8,128] [32,1024,8,128] [32,1024,8,128]"),
        "attention of grouped heads":
            (_attention(True),
             "[32,1024,16,128] [32,1024,8,128] [32,1024,8,128]"),
        "attention written out":
            (_written_out,
             "[32,1024,8,128] [32,1024,8,128] [32,1024,8,128]"),
        "attention over long sequences":
            (_written_out,
             "[16,4096,4,64] [16,4096,4,64] [16,4096,4,64]"),
        "cudnn attention": (_cudnn, "[32,1024,8,128] [32,1024,8,128] [32,1024,8,128]"),
    },
    "conv": {
        "convolution": (_conv(), "[512,32,32,128] [3,3,128,128]"),
        "convolution of few channels": (_conv(), "[256,64,64,64] [3,3,64,64]"),
        "convolution in strides": (_conv(2), "[512,64,64,64] [3,3,64,128]"),
        "stem": (_conv(2), "[512,112,112,3] [7,7,3,64]"),
        "patches": (_conv(16, "VALID"), "[512,224,224,3] [16,16,3,768]"),
        "pointwise": (_conv(), "[512,32,32,256] [1,1,256,256]"),
        "depthwise": (_conv(groups=128), "[512,32,32,128] [3,3,1,128]"),
        "grouped": (_conv(groups=4), "[256,32,32,256] [3,3,64,256]"),
        "dilated": (_conv(dilation=2), "[256,32,32,128] [3,3,128,128]"),
        "of sequences": (_conv(), "[256,4096,128] [3,128,128]"),
        "of volumes": (_conv(), "[32,32,32,32,64] [3,3,3,64,64]"),
        "transposed": (_transposed_conv, "[512,32,32,128] [2,2,128,64]"),
    },
    "elementwise": {
        "gelu": (jax.nn.gelu, "[65536,4096]"),
        "exact gelu": (lambda x: jax.nn.gelu(x, approximate=False), "[65536,4096]"),
        "sum of two": (lambda x, y: x + y, "[65536,4096] [65536,4096]"),
        "bias and relu": (lambda x, b: jax.nn.relu(x + b), "[65536,4096] [4096]"),
        "cast": (lambda x: x.astype(jnp.float32), "[65536,4096]"),
        "mask":
            (lambda x: jnp.where(jnp.tri(2048, dtype=bool), x, -1e9),
             "[128,2048,2048]"),
        "complex product":
            (lambda x, y: jnp.abs(lax.complex(x, y) * lax.complex(y, x)),
             "float32[65536,1024] float32[65536,1024]"),
        "integers": (lambda x: (x * 3 + 1) % 7, "int32[65536,2048]"),
    },
    "reduce": {
        "sum of rows": (lambda x: x.sum(-1), "[65536,4096]"),
        "sum over rows": (lambda x: x.sum(0), "[65536,4096]"),
        "sum of all": (lambda x: (x * x).sum(), "[65536,4096]"),
        "max of rows": (lambda x: x.max(-1), "[65536,4096]"),
        "argmax": (lambda x: x.argmax(-1), "[65536,2048]"),
        "softmax": (lambda x: jax.nn.softmax(x), "[65536,4096]"),
        "softmax of heads": (lambda x: jax.nn.softmax(x), "[64,8,1024,1024]"),
        "layer norm": (_layer_norm, "[65536,4096] [4096]"),
        "rms norm": (_rms_norm, "[65536,4096] [4096]"),
        "batch norm": (_batch_norm, "[512,32,32,128] [128]"),
        "cumsum": (lambda x: jnp.cumsum(x, 1), "[8192,2048]"),
        "top 8": (lambda x: lax.top_k(x, 8), "[8192,2048]"),
        "sort": (lambda x: jnp.sort(x, -1), "[8192,1024]"),
        "largest of windows": (_pooled, "[512,64,64,128]"),
        "distances":
            (lambda x, y: ((x[:, None] - y) ** 2).sum(-1),
             "[16384,64] [1024,64]"),
    },
    "gather": {
        "look-up of rows": (lambda w, i: w[i], "[32768,1024] int32[65536]"),
        "look-up of narrow rows": (lambda w, i: w[i], "[262144,32] int32[65536]"),
        "sum of segments": (_segment_sum, "[65536,256] int32[65536]"),
        "one of each row":
            (lambda x, i: jnp.take_along_axis(x, i[:, None], 1),
             "[65536,4096] int32[65536]"),
        "rows set":
            (lambda x, i, y: x.at[i].set(y),
             "[65536,1024] int32[4096] [4096,1024]"),
        "slice at a position":
            (lambda x, i: lax.dynamic_slice_in_dim(x, i, 128, 1),
             "[8192,1024,8] int32[]"),
        "write at a position": (_written, "[64,4096,1024] [64,1,1024] int32[]"),
    },
    "linalg": {
        "cholesky":
            (lambda x: lax.linalg.cholesky(_definite(x)),
             "float32[1024,64,64]"),
        "triangular solve": (_solved, "float32[1024,64,64] float32[1024,64,8]"),
        "qr": (lambda x: jnp.linalg.qr(x)[0], "float32[256,64,32]"),
        "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), "float32[8192,1024]"),
        "convolution by fft": (_convolved_by_fft, "float32[4096,4096]"),
    },
    "random": {
        "dropout": (_dropout, "[65536,1024] uint32[2]"),
        "noise": (_noise, "[65536,1024] uint32[2]"),
    },
    "reshape": {
        "split into heads": (_heads, "[64,1024,1024]"),
        "space to depth": (_blocks, "[512,64,64,64]"),
        "flat": (lambda x: x.reshape(x.shape[0], -1), "[512,32,32,128]"),
    },
    "shape": {
        "transpose": (lambda x: x.swapaxes(1, 2), "[512,512,512]"),
        "transpose of all": (lambda x: x.T, "[16384,8192]"),
        "slice": (lambda x: x[:, 1:-1], "[1024,1024,256]"),
        "every second": (lambda x: x[:, ::2], "[1024,1024,256]"),
        "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 1), (0, 0))), "[1024,1024,256]"),
        "concatenation":
            (lambda x, y: jnp.concatenate([x, y], -1),
             "[65536,1024] [65536,1024]"),
        "reversed": (lambda x: x[:, ::-1], "[1024,1024,256]"),
        "repeated": (lambda x: jnp.repeat(x, 2, 1), "[1024,512,256]"),
    },
    "rotate": {
        "roll": (lambda x: jnp.roll(x, 1, 1), "[1024,1024,256]"),
        "stencil": (_stencil, "[1024,1024,256]"),
        "rotary positions": (_rotary, "[64,1024,8,128]"),
    },
    "mixed": {
        "gated mlp": (_gated, "[32768,1024] [1024,4096] [1024,4096] [4096,1024]"),
        "cross entropy": (_cross_entropy, "[16384,1024] [1024,32768] int32[16384]"),
        "steps of a power iteration": (_power, "[1024,256,256]"),
        "until small": (_until, "[1024,1024]"),
        "clip by norm": (_clipped, "[8192,8192]"),
    },
}  # fmt: skip
"""Functions by family and name, with their arguments: those without a type have that of
the variation."""
