"""The framework models that other tests shard do train, on one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers_models import CASES, OPTIMIZERS

from tests.cases import covering


def _losses(step, args, num_steps=4):
    *state, batch = args
    losses = []
    for _ in range(num_steps):
        *state, loss = step(*state, batch)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("name", covering(CASES, ["equinox_mlp"]))
def test_loss_falls(name):
    step, args, donate_argnums = CASES[name]()
    jit = jax.jit
    if name.startswith("equinox"):
        jit = pytest.importorskip("equinox").filter_jit
        leaves = jax.tree.leaves(args[0])
        assert any(callable(leaf) for leaf in leaves), "no leaf that is no array"
    losses = _losses(jit(step), args)
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert donate_argnums == tuple(range(len(args) - 1))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_keep_their_state_shape(optimizer):
    step, args, _ = CASES["nnx_split"](optimizer)
    out = jax.eval_shape(step, *args)
    state = jax.eval_shape(lambda *state: state, *args[:-1])
    assert jax.tree.structure(out[:-1]) == jax.tree.structure(state)
    assert jax.tree.leaves(out[:-1]) == jax.tree.leaves(state)
