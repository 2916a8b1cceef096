"""Layers that several models share: norms, attention, losses, stacks.

Heads and gates are separate dims in weights and activations, so that no reshape is
needed between matmuls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rhino_jax.frontend.forms.attention import FORMS
from rhino_jax.frontend.forms.choose import choose


Params = dict[str, Any]

_MASKED = -1e9


def cast(tree: Any, dtype: DTypeLike) -> Any:
    """Cast all leaves to the compute type."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def layer_norm(params: Params, x: jax.Array) -> jax.Array:
    """Apply LayerNorm over the last dim, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * params["scale"] + params["bias"]


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Apply RMSNorm over the last dim, in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * scale


def causal_mask(seq_len: int) -> jax.Array:
    """Return a mask [Q, S], True where a query may attend to a key."""
    return jnp.tril(jnp.ones((seq_len, seq_len), bool))


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Apply softmax attention, with the softmax in float32.

    Args:
      q, k, v: queries, keys, values.
      scale: factor of the scores.
      mask: False where a query may not attend to a key; None: no mask.
      bias: added to the scores; None: no bias.
    Shapes:
      q [B, Q, H, K]; k, v [B, S, H, K]; mask [Q, S]; bias [H, Q, S];
      result [B, Q, H, K].
    """
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k).astype(jnp.float32) * scale
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhqs,bshk->bqhk", weights, v)


Attend = Callable[..., jax.Array]
"""Causal attention: (q, k, v, mask) → [B, S, ..., K], as q; mask [S, S]."""


def in_form(form: str, plain: Attend) -> Attend:
    """Return causal attention in a form.

    Args:
      form: as `DecoderConfig.attention`.
      plain: the form "xla". The others merge the heads of q, and take k and v
        [B, S, G, K], where G divides the number of heads.
    """
    if form == "choose":
        return _chosen(plain)
    return plain if form == "xla" else _kernel(form)


@functools.cache
def _kernel(form: str) -> Attend:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
        return FORMS[form](heads, k, v, is_causal=True).reshape(q.shape)

    return attend


@functools.cache
def _chosen(plain: Attend) -> Attend:
    kernels = {form: _kernel(form) for form in FORMS if form != "xla"}
    return choose(xla=plain, **kernels)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean of logsumexp(logits) - logits[label], in float32.

    The label's logit is selected by a comparison, not a gather, so that the classes
    may be sharded.

    Shapes:
      logits [..., V]; labels [...] integers; result a scalar.
    """
    logits = logits.astype(jnp.float32)
    chosen = jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32)
    picked = jnp.sum(logits * chosen, axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def token_batch(config: Any, key: jax.Array, length: int | None = None) -> Params:
    """Return random next-token examples: `tokens` and `labels`, int32 [B, S] each.

    Args:
      config: a config with `batch`, `vocab` and `seq_len`.
      key: PRNG key.
      length: replaces `seq_len`.
    """
    shape = config.batch, (length or config.seq_len) + 1
    text = jax.random.randint(key, shape, 0, config.vocab)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def token_scores(config: Any, params: Params, x: jax.Array) -> jax.Array:
    """Return next-token scores of activations: x [B, S, D] to [B, S, V].

    Args:
      config: a config with `dtype` and `tied_embedding`.
      params: parameters with `embed` [V, D], and `head` [D, V] where it is not tied.
      x: activations.
    """
    if config.tied_embedding:
        return jnp.einsum("bsd,vd->bsv", x, params["embed"].astype(config.dtype))
    return jnp.einsum("bsd,dv->bsv", x, params["head"].astype(config.dtype))


REMAT_POLICIES: dict[str, Callable[..., bool] | None] = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def run_stack(
    config: Any, block: Callable[[Params, Any], Any], params: Any, x: Any
) -> Any:
    """Apply equal blocks one after the other.

    Args:
      config: a `StackConfig`: whether blocks are scanned or unrolled, and what the
        backward pass saves.
      block: `block(params, x) -> x`.
      params: as described by `weights.stack` with the same `config.layers`.
      x: the first block's input.
    """
    if config.remat:
        # Inside a scan, CSE with the forward pass is not possible anyway.
        block = jax.checkpoint(
            block,
            prevent_cse=config.layers != "scan",
            policy=REMAT_POLICIES[config.remat_policy],
        )
    if config.layers == "scan":
        return jax.lax.scan(lambda carry, p: (block(p, carry), None), x, params)[0]
    for block_params in params:
        x = block(block_params, x)
    return x
