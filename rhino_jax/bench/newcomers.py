"""Steps as a first-time user of rhino_jax writes them; they need Flax.

Flax objects, a loop over layers, gradients accumulated by hand, BatchNorm and averaged
parameters. `configs/bench/calls.toml` calls each once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rhino_jax.models.config import ModelConfig
from rhino_jax.models.workload import Workload


EMA = 0.999


def _network(width: int, num_blocks: int, num_classes: int) -> Any:
    """Return the Flax module."""
    from flax import linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(width, (3, 3))(x)
            for _ in range(num_blocks):
                y = nn.BatchNorm(use_running_average=False)(x)
                y = nn.Conv(width, (3, 3), use_bias=False)(nn.relu(y))
                y = nn.BatchNorm(use_running_average=False)(y)
                x = x + nn.Conv(width, (3, 3), use_bias=False)(nn.relu(y))
            return nn.Dense(num_classes)(x.mean((1, 2)))

    return Network()


def batch_norm(
    batch: int = 32,
    image_size: int = 16,
    width: int = 16,
    num_blocks: int = 2,
    num_classes: int = 10,
) -> Workload:
    """Return the batch_norm: classification of [batch, image_size, image_size, 3].

    A Flax Linen residual network with BatchNorm and averaged parameters (EMA); all
    state is in one dict.
    """
    network = _network(width, num_blocks, num_classes)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def init(key: jax.Array) -> tuple[Any, ...]:
        images = jnp.zeros((1, image_size, image_size, 3))
        variables = network.init(key, images)
        params = variables["params"]
        return (
            {
                "params": params,
                "ema": jax.tree.map(jnp.copy, params),
                "batch_stats": variables["batch_stats"],
                "opt_state": optimizer.init(params),
            },
        )

    def make_batch(key: jax.Array) -> Any:
        first, second = jax.random.split(key)
        return {
            "images": jax.random.normal(first, (batch, image_size, image_size, 3)),
            "labels": jax.random.randint(second, (batch,), 0, num_classes),
        }

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_fn(params: Any) -> tuple[Any, Any]:
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            logits, changed = network.apply(
                variables, batch["images"], mutable=["batch_stats"]
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["labels"]
            )
            return losses.mean(), changed["batch_stats"]

        found = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        (loss, batch_stats), grads = found
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        ema = jax.tree.map(
            lambda old, new: EMA * old + (1 - EMA) * new, state["ema"], params
        )
        new = {"params": params, "ema": ema, "batch_stats": batch_stats}
        return {**new, "opt_state": opt_state}, loss

    return Workload(
        name="newcomer-batchnorm",
        config=ModelConfig(batch=batch),
        init=init,
        make_batch=make_batch,
        step=train_step,
        donate_argnums=(0,),
    )


def rms_norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotary(x: Any) -> Any:
    """Rotate x [B, S, N, H] by its position in S."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def loss_fn(params: Any, tokens: Any) -> Any:
    """Return the mean next-token cross entropy of tokens [B, S + 1]."""

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        q, k, v = jnp.einsum("bsd,dcnh->cbsnh", rms_norm(x, p["norm1"]), p["qkv"])
        y = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        x = x + jnp.einsum("bsnh,nhd->bsd", y, p["out"])
        y = rms_norm(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], params["layers"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        x @ params["head"], tokens[:, 1:]
    )
    return losses.mean()


def llama(
    batch: int = 32,
    seq_len: int = 64,
    width: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    vocab: int = 512,
    micro_batches: int = 4,
) -> Workload:
    """Return the llama: next-token training of [batch, seq_len] in micro-batches.

    A decoder with rotary positions and SwiGLU, layers in a `lax.scan`; a second scan
    accumulates gradients over micro-batches.
    """
    optimizer = optax.adamw(1e-3)
    shapes = {
        "norm1": (width,),
        "qkv": (width, 3, num_heads, width // num_heads),
        "out": (num_heads, width // num_heads, width),
        "norm2": (width,),
        "gate": (width, 3 * width),
        "up": (width, 3 * width),
        "down": (3 * width, width),
    }

    def init(key: jax.Array) -> tuple[Any, ...]:
        keys = iter(jax.random.split(key, len(shapes) + 2))

        def made(shape: tuple[int, ...]) -> Any:
            return jax.random.normal(next(keys), shape) / math.sqrt(width)

        layers = {name: made((num_layers, *shape)) for name, shape in shapes.items()}
        layers |= {name: 1 + layers[name] for name in ("norm1", "norm2")}
        params = {"embed": made((vocab, width)), "layers": layers}
        params["head"] = made((width, vocab))
        return params, optimizer.init(params)

    def make_batch(key: jax.Array) -> Any:
        return jax.random.randint(key, (batch, seq_len + 1), 0, vocab)

    def train_step(params: Any, opt_state: Any, tokens: Any) -> tuple[Any, Any, Any]:
        def add(total: Any, part: Any) -> tuple[Any, None]:
            found = jax.value_and_grad(loss_fn)(params, part)
            return jax.tree.map(jnp.add, total, found), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        parts = tokens.reshape(micro_batches, -1, seq_len + 1)
        total, _ = jax.lax.scan(add, zero, parts)
        loss, grads = jax.tree.map(lambda x: x / micro_batches, total)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return Workload(
        name="newcomer-llama",
        config=ModelConfig(batch=batch),
        init=init,
        make_batch=make_batch,
        step=train_step,
        donate_argnums=(0, 1),
    )


def _transformer(width: int, num_layers: int, num_heads: int, vocab: int) -> Any:
    """Return the class of the model."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norm1 = nnx.LayerNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                num_heads, width, use_bias=False, decode=False, rngs=rngs
            )
            self.norm2 = nnx.LayerNorm(width, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
            x = x + self.attention(self.norm1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class Transformer(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(vocab, width, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(num_layers)])
            self.norm = nnx.LayerNorm(width, rngs=rngs)
            self.head = nnx.Linear(width, vocab, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Transformer


def transformer(
    batch: int = 16,
    seq_len: int = 64,
    width: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    vocab: int = 512,
) -> Workload:
    """Return the transformer: next-token training of tokens [batch, seq_len].

    A transformer of Flax NNX modules in a list. State is a module and its optimizer,
    which the step changes in place.
    """
    from flax import nnx

    make = _transformer(width, num_layers, num_heads, vocab)

    def init(key: jax.Array) -> tuple[Any, ...]:
        model = make(nnx.Rngs(key))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def make_batch(key: jax.Array) -> Any:
        tokens = jax.random.randint(key, (batch, seq_len + 1), 0, vocab)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model(batch["inputs"]), batch["targets"]
            )
            return losses.mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return Workload(
        name="newcomer-nnx",
        config=ModelConfig(batch=batch),
        init=init,
        make_batch=make_batch,
        step=train_step,
        donate_argnums=(),
        jit=nnx.jit,
    )


MODELS: Mapping[str, Callable[..., Workload]] = {
    "newcomer-batchnorm": batch_norm,
    "newcomer-llama": llama,
    "newcomer-nnx": transformer,
}
"""Name of a model → function that makes its workload, with its sizes as keywords."""
