"""Models as users of flax.linen, flax.nnx and Equinox write them, with optax."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from helpers_models import CASES, OPTIMIZERS

import rhino_jax as rhino
from tests.behaviour.compare import assert_same, mesh_of


# Every model with one optimizer in the fast tests, with the others in the slow ones.
# Adam and Adafactor divide a gradient by its own size: where that is rounding noise
# (the key bias of an attention layer) the update is noise too, so attention models
# are compared with SGD.
PAIRED = {
    "linen_transformer": ("sgd",),
    "linen_cnn": ("adamw", "clip"),
    "nnx_split": ("sgd",),
    "nnx_state": ("sgd",),
    "equinox_mlp": ("multi_steps", "adafactor", "clip"),
    "equinox_attention": ("sgd",),
}


# 2 % of the learning rate, see test_same_numbers.py; SGD needs none of it.
ATOL = {"sgd": 1e-8, "adafactor": 2e-4}


def cases() -> list[Any]:
    return [
        pytest.param(name, optimizer, marks=(pytest.mark.slow,) if i else ())
        for name, optimizers in PAIRED.items()
        for i, optimizer in enumerate(optimizers)
    ]


def test_every_model_and_optimizer_is_compared() -> None:
    assert set(PAIRED) == set(CASES)
    assert {o for row in PAIRED.values() for o in row} == set(OPTIMIZERS)


def copied(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


@pytest.mark.parametrize(("name", "optimizer"), cases())
def test_two_steps_equal_the_single_device_run(name: str, optimizer: str) -> None:
    step, args, donate_argnums = CASES[name](optimizer)
    single = jax.jit(step)
    if name.startswith("equinox"):
        single = pytest.importorskip("equinox").filter_jit(step)
    sharded = rhino.auto_shard(
        step,
        mesh=mesh_of((2, 4)),
        hardware="v5e",
        donate_argnums=donate_argnums,
        progress=False,
    )
    *expected, batch = args
    got = copied(expected)
    for _ in range(2):
        *expected, loss = single(*expected, batch)
        *got, sharded_loss = sharded(*got, batch)
        assert_same((expected, loss), (got, sharded_loss), ATOL.get(optimizer, 2e-5))
    plan = sharded.plan(*got, batch)
    assert plan.coverage.unknown == ()
    assert plan.coverage.flops == 1.0
