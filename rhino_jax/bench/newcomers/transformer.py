"""A transformer of Flax NNX modules in a list, with `nnx.Optimizer`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from rhino_jax.models.config import ModelConfig
from rhino_jax.models.workload import Workload


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


def workload(
    batch: int = 16,
    seq_len: int = 64,
    width: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    vocab: int = 512,
) -> Workload:
    """Return the workload: next-token training of tokens [batch, seq_len].

    State is a module and its optimizer, which the step changes in place.
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
