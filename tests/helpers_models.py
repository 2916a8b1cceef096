"""Train steps written in flax.linen, flax.nnx and Equinox, as their users write them.

Every case of `CASES` is a function from the name of an optimizer (see `OPTIMIZERS`)
to `(step, args, donate_argnums)`. Steps return the fed-back arguments, then the loss.
The frameworks are imported inside, so that a missing one skips only its own tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest


Case = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]

BATCH, SEQ_LEN, WIDTH, HEADS, VOCAB = 8, 16, 64, 8, 128

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3)),
    "multi_steps": lambda: optax.MultiSteps(
        optax.adamw(1e-3), 2
    ).gradient_transformation(),
}


def token_batch() -> dict[str, jax.Array]:
    """Tokens and labels, int32 [BATCH, SEQ_LEN]."""
    text = jax.random.randint(jax.random.key(1), (BATCH, SEQ_LEN + 1), 0, VOCAB)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def image_batch() -> dict[str, jax.Array]:
    """Images [BATCH, 16, 16, 8] and labels [BATCH] of 16 classes."""
    images, labels = jax.random.split(jax.random.key(2))
    return {
        "images": jax.random.normal(images, (BATCH, 16, 16, 8)),
        "labels": jax.random.randint(labels, (BATCH,), 0, 16),
    }


def vector_batch() -> dict[str, jax.Array]:
    """Inputs and targets, float32 [BATCH, WIDTH]."""
    x, y = jax.random.split(jax.random.key(3))
    shape = (BATCH, WIDTH)
    return {"x": jax.random.normal(x, shape), "y": jax.random.normal(y, shape)}


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def linen_transformer(optimizer: str = "adamw") -> Case:
    """flax.linen blocks; `step(TrainState, batch) -> (TrainState, loss)`."""
    nn = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            attention = nn.MultiHeadDotProductAttention(num_heads=HEADS)
            x = x + attention(nn.LayerNorm()(x), mask=mask)
            hidden = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))
            return x + nn.Dense(WIDTH, name="down")(hidden)

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            embed = nn.Embed(VOCAB, WIDTH)
            x = embed(tokens)
            for i in range(2):
                x = Block(name=f"block_{i}")(x, nn.make_causal_mask(tokens))
            return embed.attend(nn.LayerNorm()(x))

    model, batch = Transformer(), token_batch()
    params = jax.jit(model.init)(jax.random.key(0), batch["tokens"])["params"]
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=OPTIMIZERS[optimizer]()
    )

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["tokens"])
            return _cross_entropy(logits, batch["labels"])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return step, (state, batch), (0,)


def linen_cnn(optimizer: str = "adamw") -> Case:
    """flax.linen convolutions with BatchNorm and dropout.

    `step(TrainState, batch)`; the state also holds the running statistics and the
    dropout's PRNG key.
    """
    nn = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for channels in (16, 32):
                x = nn.Conv(channels, (3, 3), use_bias=False)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
            x = x.reshape(x.shape[0], -1)
            x = nn.Dropout(0.1, deterministic=False)(nn.relu(nn.Dense(64)(x)))
            return nn.Dense(16)(x)

    class State(train_state.TrainState):
        batch_stats: Any
        key: jax.Array

    model, batch = CNN(), image_batch()
    key = jax.random.key(0)
    variables = jax.jit(model.init)({"params": key, "dropout": key}, batch["images"])
    state = State.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=OPTIMIZERS[optimizer](),
        batch_stats=variables["batch_stats"],
        key=jax.random.key(4),
    )

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, updated = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["images"],
                mutable=["batch_stats"],
                rngs={"dropout": jax.random.fold_in(state.key, state.step)},
            )
            return _cross_entropy(logits, batch["labels"]), updated["batch_stats"]

        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, batch_stats), grads = value_and_grad(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    return step, (state, batch), (0,)


def nnx_split(optimizer: str = "adamw") -> Case:
    """A flax.nnx MLP split to a pure function: `step(params, opt_state, batch)`."""
    nnx = pytest.importorskip("flax.nnx")

    class MLP(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.norm = nnx.LayerNorm(4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(nnx.gelu(self.norm(self.up(x))))

    graph, params = nnx.split(MLP(nnx.Rngs(0)), nnx.Param)
    tx = OPTIMIZERS[optimizer]()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        out = nnx.merge(graph, params)(batch["x"])
        return jnp.mean(jnp.square(out - batch["y"]))

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, (params, tx.init(params), vector_batch()), (0, 1)


def nnx_state(optimizer: str = "adamw") -> Case:
    """A flax.nnx transformer with its optimizer, passed as one NNX state pytree.

    `step(state, batch) -> (state, loss)`, state of (model, nnx.Optimizer).
    """
    nnx = pytest.importorskip("flax.nnx")

    class Transformer(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                num_heads=HEADS, in_features=WIDTH, decode=False, rngs=rngs
            )
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
            x = x + self.down(nnx.gelu(self.up(x)))
            return self.embed.attend(x)

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return _cross_entropy(model(batch["tokens"]), batch["labels"])

    model = Transformer(nnx.Rngs(0))
    optimizer_ = nnx.Optimizer(model, OPTIMIZERS[optimizer](), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer_))

    def step(state: Any, batch: Any) -> Any:
        model, optimizer_ = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer_.update(model, grads)
        return nnx.state((model, optimizer_)), loss

    return step, (state, token_batch()), (0,)


def equinox_mlp(optimizer: str = "adamw") -> Case:
    """An Equinox MLP passed whole, activation functions among its leaves.

    `step(model, opt_state, batch) -> (model, opt_state, loss)`.
    """
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(
        WIDTH, WIDTH, 4 * WIDTH, 2, activation=jax.nn.gelu, key=jax.random.key(0)
    )

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.square(jax.vmap(model)(batch["x"]) - batch["y"]))

    return _equinox_case(eqx, model, loss_fn, vector_batch(), optimizer)


def equinox_attention(optimizer: str = "adamw") -> Case:
    """An Equinox attention block passed whole, an activation among its leaves.

    `step(model, opt_state, batch) -> (model, opt_state, loss)`.
    """
    eqx = pytest.importorskip("equinox")

    class Transformer(eqx.Module):
        embed: Any
        norm: Any
        attention: Any
        mlp: Any
        activation: Callable[..., jax.Array]

        def __init__(self, key: jax.Array) -> None:
            embed, attention, mlp = jax.random.split(key, 3)
            self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=embed)
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention)
            self.mlp = eqx.nn.Linear(WIDTH, WIDTH, key=mlp)
            self.activation = jax.nn.silu

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = jax.vmap(self.embed)(tokens)
            normed = jax.vmap(self.norm)(x)
            mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
            x = x + self.attention(normed, normed, normed, mask=mask)
            x = x + self.activation(jax.vmap(self.mlp)(x))
            return x @ self.embed.weight.T

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return _cross_entropy(jax.vmap(model)(batch["tokens"]), batch["labels"])

    model = Transformer(jax.random.key(0))
    return _equinox_case(eqx, model, loss_fn, token_batch(), optimizer)


def _equinox_case(
    eqx: Any, model: Any, loss_fn: Callable[..., Any], batch: Any, optimizer: str
) -> Case:
    tx = OPTIMIZERS[optimizer]()

    def step(model: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, loss

    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, opt_state, batch), (0, 1)


CASES: dict[str, Callable[..., Case]] = {
    "linen_transformer": linen_transformer,
    "linen_cnn": linen_cnn,
    "nnx_split": nnx_split,
    "nnx_state": nnx_state,
    "equinox_mlp": equinox_mlp,
    "equinox_attention": equinox_attention,
}
