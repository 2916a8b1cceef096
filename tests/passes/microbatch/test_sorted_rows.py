"""Tokens in the order of their experts: micro-batches that sort their own rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.errors import MicrobatchError
from rhino_jax.passes.microbatch import MicrobatchCut
from tests.passes.experts.mixtures import (
    CHOICES,
    EXPERTS,
    LAYERS,
    WIDTH,
    added_back,
    batch,
    multiplied,
    params,
    routed,
    step_of,
    taken_back,
)
from tests.passes.microbatch.helpers_microbatch import check, cut_of


@pytest.mark.parametrize("layer", LAYERS)
def test_each_micro_batch_sorts_its_own_rows(layer):
    (cut, *_) = check(step_of(layer, "unroll"), (params(), batch()), counts=(2, 4))
    assert len(cut.loops) == 1 and cut.meeting_flops == 0


def test_rows_of_many_micro_batches():
    """More than those for which positions are evaluated."""
    check(step_of(taken_back, "unroll"), (params(), batch(20, 2)), counts=(5,))


@pytest.mark.parametrize("loop", ["scan", "checkpoint"])
@pytest.mark.parametrize("layer", LAYERS[:3])
def test_so_do_layers_of_a_loop(layer, loop):
    (cut,) = check(step_of(layer, loop), (params(2), batch()), counts=(3,))
    assert len(cut.loops) == 1


def limited(p, x, most=3):
    """Each expert drops what comes after its first rows."""
    weights, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
    first = jnp.cumsum(sizes) - sizes
    place = jnp.arange(order.size) - first[experts.reshape(-1)[order]]
    y = multiplied(p, x[order // CHOICES], sizes)
    y = jnp.where(place[:, None] < most, y, 0) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // CHOICES].add(y)


def by_place(p, x):
    """Tokens have a part that depends on their place in the order."""
    y = added_back(p, x)
    order = jnp.argsort(routed(p, x)[1].reshape(-1))
    return y + jnp.sin(order.reshape(-1, CHOICES).sum(1).astype(x.dtype))[:, None]


def counted_otherwise(p, x):
    """Groups are counted by other keys than rows are sorted by."""
    _, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount((experts.reshape(-1) + 1) % EXPERTS, length=EXPERTS)
    y = multiplied(p, x[order // CHOICES], sizes)
    return jnp.zeros_like(x).at[order // CHOICES].add(y)


def through(rows_of):
    """A layer that computes tokens from rows of some order and adds them back."""

    def layer(p, x):
        order = jnp.argsort(routed(p, x)[1].reshape(-1))
        y = jnp.tanh(rows_of(x, order) @ p["up"][0])[:, :WIDTH]
        return jnp.zeros_like(x).at[order // CHOICES].add(y)

    return layer


def next_row(x, order):
    """Each sorted row reads the one after it."""
    return jnp.roll(x[order // CHOICES], 1, axis=0)


def by_other_rows(x, order):
    """Sorted rows meet rows in the order of the batch."""
    return x[order // CHOICES] * jnp.repeat(x, CHOICES, axis=0)


def shifted(x, order):
    """Rows are looked up one place further on."""
    return x[(order // CHOICES + 1) % x.shape[0]]


COUPLED = [
    *(limited, by_place, counted_otherwise),
    *map(through, (next_row, by_other_rows, shifted)),
]


@pytest.mark.parametrize("layer", COUPLED)
def test_what_needs_the_order_of_all_rows_is_not_cut(layer):
    """It runs on the whole batch, or is refused; its numbers are never others."""
    step, args = step_of(layer, "unroll"), (params(), batch())
    found = cut_of(step, args)
    if isinstance(found, MicrobatchCut):
        check(step, args, counts=(2,))
        assert found.meeting_flops > 0 or len(found.loops) > 1
    else:
        assert isinstance(found, MicrobatchError)


def test_an_order_that_is_returned_is_of_all_rows():
    def step(p, b):
        x = b["x"].reshape(-1, WIDTH)
        order = jnp.argsort(routed(p, x)[1].reshape(-1))
        return jnp.tanh(x @ p["up"][0]).sum(), order

    p = jax.tree.map(lambda a: a[0], params())
    check(step, (p, batch()), counts=(2,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2, "mesh": {"x": 2, "y": 2}},
        {"microbatches": 3, "mesh": {"x": 4}},
        {"microbatches": 2, "mesh": {"stage": 2, "x": 2}},
    ],
)
def test_planned_and_run_it_equals_one_device(options):
    step, args = step_of(taken_back, "unroll"), (params(2), batch())
    sharded = rhino.auto_shard(step, hardware="v5e:2x2", progress=False, **options)
    for a, b in zip(
        jax.tree.leaves(sharded(*args)), jax.tree.leaves(step(*args)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
