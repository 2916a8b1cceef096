"""Stages that do the same are searched once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax import models
from rhino_jax.planner.staging import shapes as submesh_search
from tests.cases import covering


def mlp():
    """Return a training step of a scan over 8 layers, and types of its arguments."""

    def step(params, x):
        def loss(params):
            h = jnp.tanh(x @ params["in"])
            h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["loop"])[0]
            return jnp.mean((h @ params["in"].T - x) ** 2)

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    params = {"in": (32, 32), "loop": (8, 32, 32)}
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in params.items()}
    return step, (params, jax.ShapeDtypeStruct((32, 32), jnp.float32))


def gpt():
    w = models.get("gpt-tiny", num_layers=8, batch=32)
    return w.step, w.abstract_args()


@pytest.mark.parametrize("model", covering([mlp, gpt]))
def test_stages_of_a_loop_over_layers_are_searched_once(monkeypatch, model):
    searched = []
    find = submesh_search.find

    def counted(program, *args, is_estimate=False, **more):
        if not is_estimate:  # Of a stage, not of a whole micro-batch.
            searched.append(program.name)
        return find(program, *args, is_estimate=is_estimate, **more)

    step, args = model()

    def plan():
        return rhino.plan(
            step,
            *args,
            stages=4,
            hardware="cpu:8",
            microbatches=8,
            schedule="1f1b",
            donate_argnums=0 if model is mlp else (0, 1),
            level="fast",
        )

    monkeypatch.setenv("RHINO_CACHE", "0")
    monkeypatch.setattr(submesh_search, "find", counted)
    once = plan()
    # The first, the last, and one of the two between.
    assert len(searched) == 3
    monkeypatch.setattr(
        submesh_search.SubmeshSearches,
        "find",
        lambda self, program, mesh, *rest: find(program, [mesh], *rest),
    )
    apart = plan()
    for one, other in zip(once.stages, apart.stages, strict=True):
        assert one.decisions == other.decisions
        assert one.predicted == other.predicted
    assert once.predicted == apart.predicted
    assert [leaf.path for leaf in once.inputs] == [leaf.path for leaf in apart.inputs]
