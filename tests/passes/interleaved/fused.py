"""Transformers with fused weights, as people write them, and with dims of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rhino_jax as rhino


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and how it writes its fused weights.

    Attributes:
      how: "split": `jnp.split` of `(d, 3·h·k)`; "reshape": to `(3, h, k)`, then
        indexed; "grouped": fewer heads of keys and values, sliced; "apart": weights
        of shape `(d, 3, h, k)` and `(d, 2, f)`.
      heads, kv_heads, head: how many, and the size of each.
      wide: of the feed-forward layer, and of each of gate and what it gates.
      held: the spec of what every layer reads, if it is held fixed.
    """

    how: str = "split"
    width: int = 32
    heads: int = 8
    kv_heads: int = 8
    head: int = 8
    wide: int = 64
    vocabulary: int = 64
    layers: int = 1
    is_scanned: bool = False
    is_remat: bool = False
    compute: Any = jnp.float32
    held: Any = None

    @property
    def fused(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head


def params_of(shape: Shape) -> Any:
    """Shapes of the parameters."""

    def weight(*sizes: int) -> jax.ShapeDtypeStruct:
        front = (shape.layers,) if shape.is_scanned else ()
        return jax.ShapeDtypeStruct((*front, *sizes), jnp.float32)

    d, heads = shape.width, (3, shape.heads, shape.head)
    apart = shape.how == "apart"
    layer = {
        "qkv": weight(d, *heads) if apart else weight(d, shape.fused),
        "bias": weight(*heads) if apart else weight(shape.fused),
        "out": weight(shape.heads * shape.head, d),
        "up": weight(d, 2, shape.wide) if apart else weight(d, 2 * shape.wide),
        "down": weight(shape.wide, d),
        "scale": weight(d),
    }
    layers = layer if shape.is_scanned else [dict(layer) for _ in range(shape.layers)]
    embedding = jax.ShapeDtypeStruct((shape.vocabulary, d), jnp.float32)
    return {"embedding": embedding, "layers": layers}


def tokens_of(shape: Shape, rows: int, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)


def _heads(shape: Shape, p: Any, y: jax.Array) -> list[jax.Array]:
    rows, length, _ = y.shape
    if shape.how == "apart":
        qkv = jnp.einsum("btd,dghk->btghk", y, p["qkv"]) + p["bias"]
        return [qkv[:, :, i] for i in range(3)]
    qkv = y @ p["qkv"] + p["bias"]
    if shape.how == "reshape":
        qkv = qkv.reshape(rows, length, 3, shape.heads, shape.head)
        return [qkv[:, :, i] for i in range(3)]
    if shape.how == "grouped":
        q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
        parts = qkv[..., :q], qkv[..., q : q + kv], qkv[..., q + kv :]
    else:
        parts = jnp.split(qkv, 3, -1)
    q, k, v = (x.reshape(rows, length, -1, shape.head) for x in parts)
    times = shape.heads // shape.kv_heads
    return [q, jnp.repeat(k, times, 2), jnp.repeat(v, times, 2)]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _block(shape: Shape, x: jax.Array, p: Any) -> jax.Array:
    rows, length, _ = x.shape
    x = x if shape.held is None else rhino.pin(x, shape.held)
    q, k, v = _heads(shape, p, _norm(x, p["scale"]))
    # Without the tanh, gradients of the biases of keys are zero, and updates noise.
    scores = jnp.einsum("bqhk,bshk->bhqs", q, jnp.tanh(k)) * shape.head**-0.5
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), -1)
    mixed = jnp.einsum("bhqs,bshk->bqhk", weights, v).reshape(rows, length, -1)
    x = x + mixed @ p["out"]
    y = _norm(x, p["scale"])
    if shape.how == "apart":
        both = jnp.einsum("btd,dgf->btgf", y, p["up"])
        gate, up = both[:, :, 0], both[:, :, 1]
    else:
        gate, up = jnp.split(y @ p["up"], 2, -1)
    return x + (jax.nn.silu(gate) * up) @ p["down"]


def logits_of(shape: Shape, params: Any, tokens: jax.Array) -> jax.Array:
    params = jax.tree.map(lambda w: w.astype(shape.compute), params)
    x = params["embedding"][tokens]
    block: Callable[..., jax.Array] = lambda x, p: _block(shape, x, p)  # noqa: E731
    if shape.is_remat:
        block = jax.checkpoint(block)
    if shape.is_scanned:
        x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
    else:
        for p in params["layers"]:
            x = block(x, p)
    return (x @ params["embedding"].T).astype(jnp.float32)


def train_step_of(shape: Shape, optimizer: optax.GradientTransformation) -> Any:
    """(params, state, tokens) → (params, state, loss)."""

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits = logits_of(shape, params, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def train_step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return train_step


# Where gradients are all but zero, updates are noise without an epsilon.
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-2, eps=1e-3),
    "clipped adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3)
    ),
    # Of every array, however small, rows and columns are kept apart.
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8, eps=1e-6),
}


def args_of(
    shape: Shape, optimizer: optax.GradientTransformation, rows: int, length: int
) -> tuple[Any, Any, Any]:
    """Shapes of the arguments of a training step."""
    params = params_of(shape)
    state = jax.eval_shape(optimizer.init, params)
    return params, state, tokens_of(shape, rows, length)


def random_params(shape: Shape) -> Any:
    """Return parameters that are not all alike, as NumPy arrays."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: (0.3 * rng.normal(size=x.shape)).astype(x.dtype), params_of(shape)
    )


def random_tokens(shape: Shape, rows: int, length: int) -> np.ndarray:
    given = tokens_of(shape, rows, length)
    rng = np.random.default_rng(1)
    return rng.integers(shape.vocabulary, size=given.shape, dtype=np.int32)
