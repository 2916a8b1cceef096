"""Models of the zoo with their layers in loops, each on some of four stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.models import registry


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "overrides", "schedule", "expected"),
    [
        ("t5-tiny", {}, "1f1b", {(0, 2), (2, 2)}),
        (
            "t5-tiny",
            {"optimizer": "adamw", "clip_norm": 0.5},
            "gpipe",
            {(0, 2), (2, 2)},
        ),
        ("gpt-tiny", {"num_layers": 3}, "1f1b", {(0, 3)}),
        ("gpt-tiny", {"num_layers": 6}, "gpipe", {(0, 3)}),
    ],
    ids=str,
)
def test_stacks_lie_on_some_of_four_stages(model, overrides, schedule, expected):
    overrides = {"optimizer": "sgd", "layers": "scan", **overrides}
    workload = registry.get(model, **overrides)
    args, donated = workload.make_args(jax.random.key(0)), workload.donate_argnums
    plan = rhino.plan(
        workload.step,
        *args,
        mesh={"stage": 4, "x": 2},
        microbatches=4,
        schedule=schedule,
        donate_argnums=donated,
    )
    at = {(leaf.stage, leaf.num_stages) for leaf in plan.inputs}
    assert {place for place in at if place[1] > 1} == expected
    results = []
    for step, given in (
        (jax.jit(workload.step), args),
        (plan.jit(workload.step, donate_argnums=donated), plan.put(args)),
    ):
        *state, batch = given
        for _ in range(2):
            *state, value = step(*state, batch)
        results.append((state[0], value))
    (expected_state, *_), (got, *_) = results
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected_state), strict=True):
        # Adam divides by what may be little more than noise.
        noise = 1e-5 if overrides["optimizer"] == "sgd" else 1e-4
        atol = noise * float(jnp.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol)
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-4)
