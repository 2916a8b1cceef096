"""Greedy decoding of the GPT with a key/value cache, in a `while_loop`.

One token of every sequence per iteration; the same loop reads the prompt. It stops
at the last position, or once every sequence has written the end token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rhino_jax.models import gpt, layers as nn
from rhino_jax.models.config import ModelConfig, divides
from rhino_jax.models.layers import Params


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(ModelConfig):
    """Sizes: V vocab, P prompt_len, S seq_len (prompt and answer), H num_heads.

    Attributes:
      end_token: id of the token that ends a sequence.
    """

    vocab: int
    seq_len: int
    prompt_len: int
    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    end_token: int = 1

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        yield from divides(self.d_model, self.num_heads, "num_heads", "d_model")
        if self.prompt_len >= self.seq_len:
            yield "prompt_len", f"less than seq_len = {self.seq_len}"
        if self.end_token >= self.vocab:
            yield "end_token", f"less than vocab = {self.vocab}"

    @property
    def model(self) -> gpt.GPTConfig:
        """The config of the decoded GPT."""
        own = ("prompt_len", "end_token")
        shared = {k: v for k, v in vars(self).items() if k not in own}
        return gpt.GPTConfig(**shared)


class State(NamedTuple):
    """Carry of the loop.

    Attributes:
      position: int32 scalar, position of the token that is read next.
      tokens: int32 [B, S]; 0 where not written yet.
      done: bool [B], whether the sequence has ended.
      keys, values: the cache, [L, B, S, H, K] each.
    """

    position: jax.Array
    tokens: jax.Array
    done: jax.Array
    keys: jax.Array
    values: jax.Array


def start(config: DecodeConfig, prompt: jax.Array) -> State:
    """Return the state before the first token is read: prompt [B, P]."""
    rest = config.seq_len - config.prompt_len
    d_head = config.d_model // config.num_heads
    shape = (config.num_layers, config.batch, config.seq_len, config.num_heads, d_head)
    return State(
        position=jnp.zeros((), jnp.int32),
        tokens=jnp.pad(prompt, ((0, 0), (0, rest))),
        done=jnp.zeros(config.batch, bool),
        keys=jnp.zeros(shape, config.dtype),
        values=jnp.zeros(shape, config.dtype),
    )


def block_step(
    params: Params,
    x: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply one block to one token of each sequence.

    Shapes:
      x [B, 1, D]; keys, values [B, S, H, K]; position a scalar.
    """
    p = nn.cast(params, x.dtype)
    attention = p["attention"]
    normed = nn.layer_norm(p["ln_attention"], x)
    qkv = jnp.einsum("bsd,dthk->bsthk", normed, attention["qkv"])
    qkv = qkv + attention["qkv_bias"]
    keys = jax.lax.dynamic_update_slice(keys, qkv[:, :, 1], (0, position, 0, 0))
    values = jax.lax.dynamic_update_slice(values, qkv[:, :, 2], (0, position, 0, 0))
    seen = jnp.arange(keys.shape[1])[None, :] <= position
    scale = keys.shape[-1] ** -0.5
    mixed = nn.attention(qkv[:, :, 0], keys, values, scale=scale, mask=seen)
    out = jnp.einsum("bshk,hkd->bsd", mixed, attention["out"])
    x = x + out + attention["out_bias"]
    return x + gpt.mlp(p["mlp"], nn.layer_norm(p["ln_mlp"], x)), keys, values


def token_step(config: DecodeConfig, params: Params, state: State) -> State:
    """Read the token at `position`, and write the one after it."""
    token = jax.lax.dynamic_slice_in_dim(state.tokens, state.position, 1, axis=1)
    place = jax.lax.dynamic_slice_in_dim(params["position"], state.position, 1)
    x = (params["embed"][token] + place).astype(config.dtype)

    def layer(
        x: jax.Array, inputs: tuple[Params, jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x, keys, values = block_step(inputs[0], x, *inputs[1:], state.position)
        return x, (keys, values)

    x, (keys, values) = jax.lax.scan(
        layer, x, (params["blocks"], state.keys, state.values)
    )
    x = nn.layer_norm(nn.cast(params["ln_final"], x.dtype), x)
    scores = jnp.einsum("bsd,vd->bsv", x, params["embed"].astype(x.dtype))
    following = state.position + 1
    given = jax.lax.dynamic_slice_in_dim(state.tokens, following, 1, axis=1)
    is_prompt = following < config.prompt_len
    written = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    written = jnp.where(state.done[:, None], config.end_token, written)
    written = jnp.where(is_prompt, given, written)
    return State(
        position=following,
        tokens=jax.lax.dynamic_update_slice(state.tokens, written, (0, following)),
        done=state.done | (~is_prompt & (written[:, 0] == config.end_token)),
        keys=keys,
        values=values,
    )


def decode(config: DecodeConfig, params: Params, prompt: jax.Array) -> jax.Array:
    """Continue prompts greedily: [B, P] to [B, S].

    Positions after the end token contain the end token, or 0 if the loop stopped
    before them.
    """

    def unfinished(state: State) -> jax.Array:
        return (state.position < config.seq_len - 1) & ~jnp.all(state.done)

    return jax.lax.while_loop(
        unfinished,
        lambda state: token_step(config, params, state),
        start(config, prompt),
    ).tokens


def describe(config: DecodeConfig) -> Params:
    """Return the GPT's weights, blocks stacked."""
    return gpt.describe(config.model)


def make_batch(config: DecodeConfig, key: jax.Array) -> jax.Array:
    """Return random prompts, [B, P]."""
    shape = (config.batch, config.prompt_len)
    return jax.random.randint(key, shape, 0, config.vocab)
