"""A Flax Linen residual network with BatchNorm and averaged parameters (EMA).

All state is in one dict.
"""

from __future__ import annotations

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


def workload(
    batch: int = 32,
    image_size: int = 16,
    width: int = 16,
    num_blocks: int = 2,
    num_classes: int = 10,
) -> Workload:
    """Return the workload: classification of [batch, image_size, image_size, 3]."""
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
