"""Models as users of flax.linen, flax.nnx and Equinox write them, with optax."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from helpers_models import CASES, OPTIMIZERS

import rhino_jax as rhino
from tests.behaviour.compare import assert_same, mesh_of
from tests.cases import covering


# Adam and Adafactor divide a gradient by its own size: where that is rounding noise
# (the key bias of an attention layer) the update is noise too, so attention models
# are compared with SGD.
PAIRED = [
    ("linen_transformer", "sgd"),
    ("linen_cnn", "adamw"),
    ("linen_cnn", "clip"),
    ("nnx_split", "sgd"),
    ("nnx_state", "sgd"),
    ("equinox_mlp", "multi_steps"),
    ("equinox_mlp", "adafactor"),
    ("equinox_mlp", "clip"),
    ("equinox_attention", "sgd"),
]
# Flax NNX models with their optimizers are in test_nnx_models.py, too.
SHORT = [("equinox_mlp", "adafactor")]


# 2 % of the learning rate, see test_same_numbers.py; SGD needs none of it.
ATOL = {"sgd": 1e-8, "adafactor": 2e-4}


def test_every_model_and_optimizer_is_compared() -> None:
    assert {name for name, _ in PAIRED} == set(CASES)
    assert {optimizer for _, optimizer in PAIRED} == set(OPTIMIZERS)


def copied(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)


@pytest.mark.parametrize(("name", "optimizer"), covering(PAIRED, SHORT))
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
        level="fast",
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
