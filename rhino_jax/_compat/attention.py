"""cuDNN's fused attention, traced and run where there is no GPU.

`jax.nn.dot_product_attention(implementation="cudnn")` asks for the library's version
while it is traced, and lowers for CUDA alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir


_VERSION = 91_100
"""cuDNN 9.11: the first that has all that JAX calls (`check_is_flash_attention`)."""


@contextlib.contextmanager
def fused_attention_traced() -> Iterator[None]:
    """Let cuDNN's attention be traced without the library, as for a recent GPU, and
    lowered for CPU as plain operations.

    Nothing changes where the library is. Same on both versions.
    """
    try:
        cudnn.check_cudnn_version()
    except RuntimeError:
        _lower_for_cpu()
        with mock.patch.multiple(
            cudnn,
            check_cudnn_version=lambda: _VERSION,
            check_compute_capability=lambda capability: True,
            is_cuda_compute_capability_equal=lambda capability: False,
        ):
            yield
    else:
        yield


@functools.cache
def _lower_for_cpu() -> None:
    for primitive, run in (
        (cudnn._dot_product_attention_fwd_p, _forward),
        (cudnn._dot_product_attention_bwd_p, _backward),
    ):
        lowering = mlir.lower_fun(run, multiple_results=True)
        mlir.register_lowering(primitive, lowering, platform="cpu")


def _forward(*operands: Any, is_training: bool, **params: Any) -> Any:
    out, sums = _attention(*operands, **params)
    return (out, sums) if is_training else (out,)


def _backward(q: Any, k: Any, v: Any, bias: Any, *rest: Any, **params: Any) -> Any:
    *others, _, _, cotangent = rest
    operands = (q, k, v, bias) if bias.ndim == 4 else (q, k, v)

    def run(*operands: Any) -> Any:
        q, k, v, *given = operands
        return _attention(q, k, v, given[0] if given else bias, *others, **params)[0]

    return jax.vjp(run, *operands)[1](cotangent)


def _attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    q_length: Any,
    kv_length: Any,
    q_offsets: Any,
    kv_offsets: Any,
    *pages: Any,
    scale: float,
    dropout_rate: float,
    mask_type: Any,
    layout: int,
    sliding_window_length: int | None,
    **_: Any,
) -> tuple[Any, Any]:
    """Return attention, and the logarithms of its softmax's sums, [B, N, T]."""
    if dropout_rate or q_offsets.size or any(page.size for page in pages):
        raise NotImplementedError(
            "cuDNN's attention with dropout, segments or pages runs on GPUs only."
        )
    is_heads_first = layout == cudnn.AttentionLayout.BNTH.value
    q, k, v = (x if is_heads_first else jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    shared = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, shared, axis=1) for x in (k, v))
    scores = jnp.einsum("bnth,bnsh->bnts", q, k, preferred_element_type=jnp.float32)
    scores *= scale
    if bias.ndim == 4:
        scores += bias.astype(jnp.float32)
    rows, columns = (jnp.arange(n) for n in scores.shape[2:])
    distance = rows[:, None] - columns
    seen = jnp.ones_like(distance, dtype=bool)[None, None]
    if mask_type in (cudnn.MaskType.CAUSAL, cudnn.MaskType.PADDING_CAUSAL):
        seen &= distance >= 0
    if sliding_window_length is not None:
        seen &= distance < sliding_window_length
    if cudnn.has_padding(mask_type):
        seen &= columns < kv_length[:, None, None, None]
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    sums = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - sums[..., None]).astype(v.dtype)
    out = jnp.einsum("bnts,bnsh->bnth", weights, v)
    if cudnn.has_padding(mask_type):
        is_there = rows < q_length[:, None]
        out = jnp.where(is_there[:, None, :, None], out, 0)
    return out if is_heads_first else jnp.swapaxes(out, 1, 2), sums
