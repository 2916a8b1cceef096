"""Small steps, each with something that meets the batch in its own way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers_microbatch import check, cut_of
from jax import lax

from rhino_jax.errors import MicrobatchError


B, S, D, V = 8, 6, 4, 12


def params():
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "embed": jax.random.normal(keys[0], (V, D)),
        "w": jax.random.normal(keys[1], (D, D)),
        "out": jax.random.normal(keys[2], (D, V)),
    }


def batch():
    keys = jax.random.split(jax.random.key(1), 4)
    return {
        "x": jax.random.normal(keys[0], (B, D)),
        "y": jax.random.randint(keys[1], (B,), 0, V),
        "tokens": jax.random.randint(keys[2], (B, S), 0, V),
        "mask": (jax.random.uniform(keys[3], (B, S)) < 0.7).astype(jnp.float32),
    }


def step_of(loss, tx=None, has_aux=False):
    tx = tx or optax.sgd(0.1, momentum=0.9)

    def step(params, state, batch):
        out, grads = jax.value_and_grad(loss, has_aux=has_aux)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, out

    return step, (params(), tx.init(params()), batch())


def checked(loss, counts=(2,), tx=None, has_aux=False, **options):
    step, args = step_of(loss, tx, has_aux)
    return check(step, args, (0, 1), counts, **options)


def hidden(p, b):
    return jnp.tanh(p["embed"][b["tokens"]] @ p["w"])


def logits(p, b):
    return jnp.tanh(b["x"] @ p["w"]) @ p["out"]


def cross_entropy(p, b):
    found = optax.softmax_cross_entropy_with_integer_labels(logits(p, b), b["y"])
    return found.mean()


def masked(p, b):
    out = hidden(p, b) @ p["out"]
    each = optax.softmax_cross_entropy_with_integer_labels(out, b["tokens"])
    return jnp.sum(each * b["mask"]) / jnp.sum(b["mask"])


def masked_by_row(p, b):
    out = hidden(p, b) @ p["out"]
    each = optax.softmax_cross_entropy_with_integer_labels(out, b["tokens"])
    weights = b["mask"] * (b["tokens"] != 0)
    return jnp.mean((each * weights).sum(1) / jnp.maximum(weights.sum(1), 1))


def dropout(p, b):
    keep = jax.random.bernoulli(jax.random.key(3), 0.8, (B, S, D))
    h = jnp.where(keep, hidden(p, b) / 0.8, 0)
    return jnp.mean(h @ p["out"] * b["mask"][..., None])


def narrow_dropout(p, b):
    bits = jax.random.bits(jax.random.key(3), (S, B), jnp.uint8)
    return jnp.mean(hidden(p, b) * (bits.T < 100)[..., None])


def rbg_dropout(p, b):
    key = jax.random.key(3, impl="rbg")
    return jnp.mean(hidden(p, b) * jax.random.bernoulli(key, 0.8, (B, S, D)))


def key_per_row(p, b):
    keys = jax.random.split(jax.random.key(5), B)
    noise = jax.vmap(lambda k: jax.random.normal(k, (S, D)))(keys)
    return jnp.mean((hidden(p, b) + noise) ** 2)


def positions(p, b):
    at = jnp.arange(B * S, dtype=jnp.float32).reshape(B, S, 1) / (B * S)
    return jnp.mean(hidden(p, b) * jnp.cos(at))


def one_hot(p, b):
    hot = jax.nn.one_hot(b["y"], V)
    return -jnp.mean(jnp.sum(hot * jax.nn.log_softmax(logits(p, b)), -1))


def along_axis(p, b):
    logs = jax.nn.log_softmax(logits(p, b))
    return -jnp.mean(jnp.take_along_axis(logs, b["y"][:, None], 1))


def by_row_number(p, b):
    logs = jax.nn.log_softmax(logits(p, b))
    return -jnp.mean(logs[jnp.arange(B), b["y"]])


def merged(p, b):
    flat = hidden(p, b).reshape(B * S, D) @ p["out"]
    logs = jax.nn.log_softmax(flat)
    return -jnp.mean(jnp.take_along_axis(logs, b["tokens"].reshape(-1, 1), 1))


def swapped(p, b):
    h = jnp.swapaxes(hidden(p, b), 0, 1).reshape(S * B, D) @ p["out"]
    return jnp.mean(jax.nn.logsumexp(h.reshape(S, B, V), -1) * b["mask"].T)


def running(p, b):
    h = jnp.cumsum(hidden(p, b), 1)
    return jnp.mean(jnp.sort(h, 1) * jnp.arange(S)[:, None])


def recurrent(p, b):
    def cell(h, x):
        h = jnp.tanh(x + h @ p["w"])
        return h, h

    x = jnp.swapaxes(p["embed"][b["tokens"]], 0, 1)
    _, hs = lax.scan(cell, jnp.zeros((B, D)), x)
    return jnp.mean(hs**2)


def layered(p, b):
    weights = jnp.stack([p["w"]] * 3)

    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(h @ w) + h, jnp.sum(w**2)

    h, norms = lax.scan(layer, p["embed"][b["tokens"]], weights)
    return jnp.mean((h @ p["out"]) ** 2) + 1e-3 * norms.sum()


def two_ways(p, b):
    scale = lax.cond(p["w"][0, 0] > 0, jnp.sin, jnp.cos, p["w"])
    h = lax.cond(p["w"][0, 0] > 0, jnp.tanh, jnp.sin, b["x"] @ scale)
    return jnp.mean(h**2)


def until(p, b):
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"]), b["x"]).mean()


@jax.custom_vjp
def squared(x):
    return x**2


squared.defvjp(lambda x: (x**2, x), lambda x, g: (2 * x * g,))


def custom(p, b):
    return jnp.mean(squared(jax.nn.relu(b["x"] @ p["w"])))


def weighed_by_norm(p, b):
    return cross_entropy(p, b) + 0.1 * sum(jnp.sum(x**2) for x in p.values())


def scattered(p, b):
    counts = jnp.zeros((V,)).at[b["y"]].add(logits(p, b).sum(1))
    return jnp.sum(counts) * 0.01


def smallest(p, b):
    return jnp.max(logits(p, b)) - jnp.min(logits(p, b))


LINEAR_LOSSES = [
    cross_entropy, masked, masked_by_row, dropout, narrow_dropout, rbg_dropout,
    key_per_row, positions, one_hot, along_axis, by_row_number, merged, swapped,
    running, recurrent, layered, two_ways, until, custom, weighed_by_norm, scattered,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("loss", LINEAR_LOSSES, ids=lambda f: f.__name__)
def test_one_loop_gives_the_numbers_of_the_undivided_step(loss):
    for cut in checked(loss, (2, 3)):
        assert len(cut.loops) == 1
        assert cut.again_flops == cut.meeting_flops == 0


@pytest.mark.parametrize("first", range(4))
def test_several_losses_take_one_loop(first):
    """Compiled together: each is an output, their gradients are summed."""
    losses = LINEAR_LOSSES[first::4]

    def loss(p, b):
        each = {f.__name__: f(p, b) for f in losses}
        return sum(each.values()), each

    for cut in checked(loss, (3,), has_aux=True):
        assert len(cut.loops) == 1
        assert cut.again_flops == cut.meeting_flops == 0


def test_rows_that_find_themselves_are_not_stacked():
    step, args = step_of(by_row_number)
    (loop,) = cut_of(step, args, donate=(0, 1)).loops
    assert {c.how for c in loop.leaving} == {"sum"}


def balanced(p, b):
    h = jax.nn.softmax(hidden(p, b))
    fraction = jnp.mean(h > 0.3, (0, 1))
    return masked(p, b) + jnp.sum(fraction * jnp.mean(h, (0, 1)))


def contrastive(p, b):
    one = b["x"] @ p["w"]
    other = hidden(p, b).mean(1)
    scores = one @ other.T
    labels = jnp.arange(B)
    ways = (scores, scores.T)
    each = [optax.softmax_cross_entropy_with_integer_labels(s, labels) for s in ways]
    return sum(e.mean() for e in each)


def variance(p, b):
    h = b["x"] @ p["w"]
    return jnp.sum((h - h.mean(0)) ** 2)


def test_a_balancing_loss_takes_two_loops():
    for cut in checked(balanced):
        assert len(cut.loops) == 2 and len(cut.why) == 1


@pytest.mark.parametrize("loss", [variance, smallest])
def test_rows_that_meet_twice_take_three_loops(loss):
    for cut in checked(loss):
        assert len(cut.loops) == 3 and len(cut.why) == 2


def test_rows_against_rows_run_on_the_whole_batch_between_two_loops():
    for cut in checked(contrastive, most_meeting=0.9):
        assert len(cut.loops) == 2
        assert 0 < cut.meeting_flops < cut.flops
    step, args = step_of(contrastive)
    found = cut_of(step, args, donate=(0, 1))
    assert isinstance(found, MicrobatchError)
    assert "whole batch at once" in str(found)


def test_predictions_and_counts_leave_the_loop():
    def loss(p, b):
        out = logits(p, b)
        right = jnp.sum(out.argmax(-1) == b["y"])
        best = out.argmax(-1)
        return cross_entropy(p, b), {"right": right, "best": best, "all": out}

    checked(loss, has_aux=True)


def normed(p, b):
    h = b["x"]
    for _ in range(3):
        h = h @ p["w"]
        h = jnp.tanh((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-3))
    return jnp.mean((h @ p["out"]) ** 2)


def test_batch_norm_is_refused_with_op_and_line():
    step, args = step_of(normed)
    found = cut_of(step, args, donate=(0, 1))
    assert isinstance(found, MicrobatchError)
    assert "test_microbatch_programs.py" in found.where
    assert "loops" in found.numbers and "needs a sum over the batch" in found.numbers


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.adamw(1e-2),
        lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
        lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    ],
    ids=["adamw", "clip", "adafactor", "multi_steps"],
)
def test_optimizers_run_once(make):
    (cut,) = checked(masked, (4,), tx=make())
    assert len(cut.loops) == 1


def test_pieces_that_do_not_divide():
    for cut in checked(masked, (5, 8)):
        assert cut.piece_rows * cut.count >= B


def accumulated(p, b):
    """Its user's own micro-batches."""

    def part(total, piece):
        x, y = piece
        return total + jnp.sum(jnp.tanh(x @ p["w"]) @ p["out"] * y[:, None]), None

    parts = [v.reshape(2, B // 2, *v.shape[1:]) for v in (b["x"], b["y"])]
    return lax.scan(part, 0.0, parts)[0] / B


def test_a_users_own_accumulation():
    checked(accumulated, (2,))


def test_a_count_that_cannot_be():
    step, args = step_of(masked)
    for count in (1, B + 1):
        found = cut_of(step, args, count, donate=(0, 1))
        assert isinstance(found, MicrobatchError) and str(B) in found.numbers


def test_sums_of_narrow_floats_are_kept_in_float32():
    def loss(p, b):
        p, b = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (p, b["x"]))
        return jnp.mean(jnp.tanh(b @ p["w"]) @ p["out"]).astype(jnp.float32)

    step, args = step_of(loss)
    check(step, args, (0, 1), (2, 4), rtol=2e-2)
