"""Steps as newcomers write them, trained on eight devices as on one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.bench.suite import model_of
from tests.behaviour.random_steps import TARGET


nnx = pytest.importorskip("flax.nnx")

SMALL = {"batch": 16, "seq_len": 16, "width": 32, "num_heads": 2, "vocab": 64}
SIZES = {
    "newcomer-batchnorm": {"batch": 16, "image_size": 8, "width": 8, "num_blocks": 1},
    "newcomer-llama": SMALL | {"num_layers": 3, "micro_batches": 2},
    "newcomer-nnx": SMALL,
}


def trained(work: Any, step: Any) -> tuple[Any, list[float]]:
    """Return the state after two steps, and the losses."""
    state = work.init(jax.random.key(0))
    losses = []
    for seed in (1, 2):
        batch = work.make_batch(jax.random.key(seed))
        out = step(*state, batch)
        *state, loss = out if isinstance(out, tuple) else (*state, out)
        losses.append(float(loss))
    return jax.device_get(nnx.state(state) if work.jit is nnx.jit else state), losses


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_two_steps_are_those_of_one_device(name: str) -> None:
    work = model_of(name, **SIZES[name])
    sharded = rhino.auto_shard(
        work.step,
        mesh={"x": 4, "y": 2},
        hardware=TARGET,
        donate_argnums=work.donate_argnums,
        progress=False,
    )
    state, losses = trained(work, sharded)
    want, of_one = trained(work, work.jit(work.step))
    np.testing.assert_allclose(losses, of_one, rtol=1e-5)
    # Adam divides what is all rounding by its own size: a tenth of the learning rate.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-4), state, want)
    assert sharded.last_plan is not None
    assert any(any(leaf.spec) for leaf in sharded.last_plan.inputs)


@pytest.mark.slow
def test_no_mesh_is_better_than_the_one_that_is_chosen() -> None:
    work, key = model_of("newcomer-nnx"), jax.random.key(0)
    state = nnx.eval_shape(lambda: work.init(key))
    batch = jax.eval_shape(lambda: work.make_batch(key))
    options = {"hardware": "v5e:8x8", "level": "fast", "progress": False}
    chosen = rhino.plan(work.step, *state, batch, **options)
    # Local search alone ends 61 % above the optimum on this mesh.
    given = rhino.plan(work.step, *state, batch, mesh={"x": 16, "y": 4}, **options)
    assert chosen.predicted.step_time_s <= 1.01 * given.predicted.step_time_s
