"""`rhino.attention`: attention by XLA, by cuDNN, or by JAX's splash kernel for TPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from rhino_jax._compat import hide_frames
from rhino_jax.frontend.forms.choose import choose


MAX_BLOCK = 512
"""Maximum rows and columns of a block of the splash kernel: with 512, its blocks of
scores, float32, take 1 MiB of on-chip memory."""

MIN_BLOCK = 128
"""Lanes of a TPU, of which the kernel's blocks are multiples."""


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> jax.Array:
    """Return softmax attention, in the form that the planner takes.

    The forms are "xla", which runs where rhino does not plan, "cudnn" (GPU, 16 bits)
    and "splash" (TPU, no bias and mask); see `rhino.choose`.

    Args:
      query, key, value: [B, T, N, H], [B, S, K, H] and [B, S, K, H]; N is a multiple of
        K.
      bias: added to the scores; [B or 1, N or 1, T, S].
      mask: False where a query does not attend to a key; [B or 1, N or 1, T, S].
      scale: factor of the scores; None: 1 / sqrt(H).
      causal: whether a query attends to no later key.
    Returns:
      [B, T, N, H].
    """
    return _chosen()(query, key, value, bias, mask, scale=scale, is_causal=causal)


def _splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> jax.Array:
    if bias is not None or mask is not None:
        raise NotImplementedError("splash attention takes neither bias nor mask")
    # Half a second to import.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
        splash_attention_mask as masks,
    )

    lengths = query.shape[1], key.shape[1]
    rows, columns = map(_block, lengths)
    one = (masks.CausalMask if is_causal else masks.FullMask)(lengths)
    blocks = kernels.BlockSizes(
        block_q=rows,
        block_kv=columns,
        block_q_dkv=rows,
        block_kv_dkv=columns,
        block_q_dq=rows,
        block_kv_dq=columns,
    )
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([one] * query.shape[2]),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
    )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads_first = (jnp.swapaxes(x, 1, 2) for x in (query * scale, key, value))
    return jnp.swapaxes(jax.vmap(kernel)(*heads_first), 1, 2)


def _block(length: int) -> int:
    """Return the largest block that divides a length.

    Raises:
      ValueError: none does.
    """
    for block in range(MAX_BLOCK, 0, -MIN_BLOCK):
        if length % block == 0:
            return block
    raise ValueError(f"{length} positions are no multiple of {MIN_BLOCK}")


FORMS: Mapping[str, Callable[..., jax.Array]] = {
    "xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
    "splash": _splash,
}
"""Form → its function, with the arguments of `jax.nn.dot_product_attention`."""


@functools.cache
def _chosen() -> Callable[..., jax.Array]:
    return choose(**FORMS)


hide_frames(__file__)
