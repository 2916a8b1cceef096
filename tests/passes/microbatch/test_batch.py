"""Which dim of which inputs is the batch: none of weights, wherever these are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers_microbatch import check, cut_of
from jax import lax

from rhino_jax.frontend.trace import trace


def test_the_batch_of_arguments_before_the_last():
    """The last one is no data: a step that feeds nothing back has weights of classes
    there."""

    def step(w, x, labels, of_classes):
        def loss(w):
            picked = jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1)
            return -jnp.mean(picked[:, 0] * of_classes[labels])

        return jax.value_and_grad(loss)(w)

    labels = jnp.arange(12) % 4
    args = jnp.eye(4) / 2, jnp.sin(jnp.arange(48.0)).reshape(12, 4), labels, jnp.ones(4)
    check(step, args, (), (3,))
    assert cut_of(step, args).rows == 12


def test_the_batch_of_several_arguments_after_the_first():
    """All of them are computed in micro-batches, the last one too."""

    def step(w, x, others):
        def loss(w):
            first, second = jnp.tanh(x @ w) @ w, jnp.tanh(others @ w) @ w
            return jnp.mean(jnp.sum(first * second, 1))

        return jax.value_and_grad(loss)(w)

    x = jnp.sin(jnp.arange(48.0)).reshape(12, 4)
    args = jnp.eye(4) / 2, x, jnp.cos(x)
    check(step, args, (), (3,))
    (loop,) = cut_of(step, args).loops
    program = trace(step, args, {}).program
    products = [op for op in program.ops if op.traits.is_contraction]
    assert {op.id for op in products} <= set(loop.ops)


def test_weights_of_as_many_rows_as_the_batch():
    def step(w, a, x):
        return jax.value_and_grad(lambda w: jnp.mean((x @ w) @ (a @ w).T))(w)

    x = jnp.sin(jnp.arange(48.0)).reshape(12, 4)
    check(step, (jnp.eye(4) / 2, jnp.cos(x), x), (), (3,))


def test_frozen_layers_may_be_as_many_as_the_rows():
    """The layers of a reference model, stacked and scanned over, are no batch."""

    def net(w, x):
        layers = w["in"], w["out"]
        return lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, layers)[
            0
        ]

    def step(w, reference, x):
        def loss(w):
            return jnp.mean((net(w, x) * w["head"] - net(reference, x)) ** 2)

        return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))

    rows = 4
    keys = jax.random.split(jax.random.key(0), 3)
    w = {
        "in": jax.random.normal(keys[0], (rows, 6, 5)),
        "out": jax.random.normal(keys[1], (rows, 5, 6)),
        "head": jnp.ones(6),
    }
    frozen = jax.tree.map(lambda x: 0.9 * x, w)
    check(step, (w, frozen, jax.random.normal(keys[2], (rows, 6))), (0,), (2,))


def test_queries_may_be_as_many_as_the_rows():
    """Queries that every row of the batch reads are no rows (DETR)."""

    def attend(q, x):
        scores = jax.nn.softmax(jnp.einsum("bqd,bsd->bqs", q, x))
        return jnp.einsum("bqs,bsd->bqd", scores, x)

    def step(w, images, boxes):
        def loss(w):
            x = jnp.tanh(images @ w["in"])
            q = jnp.broadcast_to(w["queries"], (len(x), *w["queries"].shape))
            return jnp.abs((q + attend(q @ w["q"], x)) @ w["out"] - boxes).mean()

        return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))

    rows, size = 4, 6
    shapes = {"in": (3, size), "queries": (rows, size), "q": (size, size)}
    shapes["out"] = (size, 4)
    w = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    images, boxes = (
        jax.ShapeDtypeStruct((rows, *shape), jnp.float32)
        for shape in [(5, 3), (rows, 4)]
    )
    assert len(cut_of(step, (w, images, boxes), donate=(0,)).loops) == 1


@pytest.mark.parametrize("is_scanned", [False, True])
def test_rows_of_a_step_that_decodes_are_in_its_state(is_scanned):
    """As many layers as rows, and as many features."""
    rows = size = layers = 4

    def decode(x, layer):
        w, cache = layer
        cache = lax.dynamic_update_slice_in_dim(cache, (x @ w["k"])[:, None], 2, 1)
        scores = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x @ w["q"], cache))
        return x + jnp.einsum("bs,bsd->bd", scores, cache), cache

    def step(w, state):
        x = w["embedding"][state["token"]]
        if is_scanned:
            x, cache = lax.scan(decode, x, (w["layers"], state["cache"]))
        else:
            cache = []
            for i, own in enumerate(state["cache"]):
                x, new = decode(
                    x, (jax.tree.map(lambda w, i=i: w[i], w["layers"]), own)
                )
                cache.append(new)
        return {"token": (x @ w["embedding"].T).argmax(-1), "cache": cache}

    keys = iter(jax.random.split(jax.random.key(0), 4))
    drawn = jax.random.normal(next(keys), (layers, rows, 5, size))
    square = (layers, size, size)
    w = {
        "embedding": jax.random.normal(next(keys), (7, size)),
        "layers": {n: jax.random.normal(next(keys), square) for n in "qk"},
    }
    state = {
        "token": jnp.arange(rows, dtype=jnp.int32),
        "cache": drawn if is_scanned else [*drawn],
    }
    (cut,) = check(step, (w, state), (1,), (2,))
    assert len(cut.loops) == 1 and not cut.meeting_flops
