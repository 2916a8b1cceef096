"""A recommendation model: embedding tables, pairwise interactions, two MLPs."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import optax

from rhino_jax.bench.holdout import parts
from rhino_jax.bench.holdout.parts import Keys, Params
from rhino_jax.models.workload import Workload


def workload(
    batch: int = 32_768,
    num_tables: int = 8,
    rows: int = 100_000,
    width: int = 128,
    num_dense: int = 16,
) -> Workload:
    """Return the workload: click prediction from dense features and table lookups.

    Every example has one index into each table.
    """
    pairs = (num_tables + 1) * num_tables // 2
    bottom, top = (num_dense, 512, 256, width), (pairs + width, 1024, 1024, 512, 1)

    def stack(keys: Keys, sizes: tuple[int, ...]) -> list[Params]:
        return [parts.dense_init(keys, a, b) for a, b in itertools.pairwise(sizes)]

    def init(keys: Keys) -> Params:
        return {
            "tables": [
                parts.normal(keys, rows, width, fan_in=width) for _ in range(num_tables)
            ],
            "bottom": stack(keys, bottom),
            "top": stack(keys, top),
        }

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        x = batch["dense"]
        for p in params["bottom"]:
            x = jax.nn.relu(parts.dense(p, x))
        looked_up = [t[batch["ids"][:, i]] for i, t in enumerate(params["tables"])]
        every = jnp.stack([x, *looked_up], axis=1)
        products = jnp.einsum("bid,bjd->bij", every, every)
        rows, columns = jnp.tril_indices(num_tables + 1, -1)
        y = jnp.concatenate([x, products[:, rows, columns]], axis=1)
        for p in params["top"][:-1]:
            y = jax.nn.relu(parts.dense(p, y))
        logits = parts.dense(params["top"][-1], y)[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicks"]).mean()

    def make_batch(key: jax.Array) -> Params:
        a, b, c = jax.random.split(key, 3)
        return {
            "dense": jax.random.normal(a, (batch, num_dense)),
            "ids": parts.tokens(b, rows, batch, num_tables),
            "clicks": jax.random.bernoulli(c, 0.1, (batch,)).astype(jnp.float32),
        }

    return parts.training(
        "unseen-dlrm", batch, init, loss_fn, make_batch, optax.adagrad(1e-2)
    )
