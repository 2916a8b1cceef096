"""Small train steps whose micro-batches are coupled: rows of the batch meet once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


D, ROWS, LAYERS, EXPERTS = 32, 16, 4, 4


def _tower(layers: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in layers:
        x = x + jnp.tanh(x @ w)
    return x


def contrastive(params: Any, batch: Any) -> jax.Array:
    """All pairs of a batch, of which those of a row belong together."""
    a = _tower(params["a"], batch["x"]) @ params["out"]
    b = _tower(params["b"], batch["y"]) @ params["out"]
    logits = jnp.exp(params["scale"]) * (a @ b.T)
    ahead = jax.nn.log_softmax(logits) + jax.nn.log_softmax(logits.T)
    return -jnp.mean(jnp.diagonal(ahead))


def balanced(params: Any, batch: Any) -> jax.Array:
    """A loss, and how unevenly the rows are routed in two of the layers."""
    x, uneven = batch["x"], jnp.float32(0)
    for i, w in enumerate(params["a"]):
        if i % 2:
            gates = jax.nn.softmax(x @ params["route"])
            taken = jax.nn.one_hot(gates.argmax(-1), EXPERTS).mean(0)
            uneven += EXPERTS * jnp.sum(taken * gates.mean(0))
        x = x + jnp.tanh(x @ w)
    return jnp.mean((x @ params["out"] - batch["y"]) ** 2) + uneven


def weighted(params: Any, batch: Any) -> jax.Array:
    """A mean by weights that the model makes itself."""
    x = _tower(params["a"], batch["x"])
    weights = jax.nn.sigmoid(x @ params["route"]).sum(-1)
    losses = jnp.square(_tower(params["b"], x) - batch["y"]).sum(-1)
    return jnp.sum(weights * losses) / jnp.sum(weights)


def hardest(params: Any, batch: Any) -> jax.Array:
    """The largest of a batch, softly: its maximum is taken off before the sum."""
    x = _tower(params["a"], batch["x"])
    losses = jnp.square(x @ params["out"] - batch["y"]).mean(-1)
    return jax.nn.logsumexp(losses)


def normed(params: Any, batch: Any) -> jax.Array:
    """What the model makes, normed over the batch, as by BatchNorm in training."""
    x = _tower(params["a"], batch["x"]) @ params["out"]
    x = (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-3)
    return jnp.mean((x - batch["y"]) ** 2)


def centred(params: Any, batch: Any) -> jax.Array:
    """A mean over the batch, and layers that read what is left: rows meet in between,
    and at the end in the largest of the losses."""
    x = _tower(params["a"], batch["x"])
    x = _tower(params["b"], x - x.mean(0))
    return jax.nn.logsumexp(jnp.square(x - batch["y"]).sum(-1))


def adversarial_step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
    """A discriminator `b` learns, then a generator `a` against what it has learnt."""

    def told_apart(b: Any, a: Any) -> jax.Array:
        made = _tower(a, batch["x"])
        real, fake = (_tower(b, v)[:, 0] for v in (batch["y"], made))
        return jnp.mean(jax.nn.softplus(-real) + jax.nn.softplus(fake))

    gradients = jax.grad(told_apart)(params["b"], params["a"])
    b = jax.tree.map(lambda p, g: p - 0.1 * g, params["b"], gradients)
    value, gradients = jax.value_and_grad(lambda a: -told_apart(b, a))(params["a"])
    a = jax.tree.map(lambda p, g: p - 0.1 * g, params["a"], gradients)
    return {**params, "a": a, "b": b}, value


def _step_of(loss: Callable[[Any, Any], jax.Array]) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    step.__name__ = loss.__name__
    return step


STEPS = {
    loss.__name__: _step_of(loss)
    for loss in (contrastive, balanced, weighted, hardest, normed, centred)
} | {"adversarial": adversarial_step}


def arguments() -> tuple[Any, Any]:
    """Parameters and a batch."""
    keys = iter(jax.random.split(jax.random.key(0), 20))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / 4

    params = {
        "a": [normal(D, D) for _ in range(LAYERS)],
        "b": [normal(D, D) for _ in range(LAYERS)],
        "out": normal(D, D),
        "route": normal(D, EXPERTS),
        "scale": jnp.float32(0.5),
    }
    return params, {"x": 4 * normal(ROWS, D), "y": 4 * normal(ROWS, D)}


def normed(params: Any, x: Any) -> Any:
    """A step whose rows meet in the statistics of every layer."""

    def loss_of(params: Any) -> Any:
        h = x
        for w in params:
            h = jnp.tanh(h @ w["up"])
            h = ((h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-3)) @ w["down"]
        return jnp.mean(h * h)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss
