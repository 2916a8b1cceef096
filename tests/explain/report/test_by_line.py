"""Seconds of a step by line, and model FLOPs utilisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.hardware.files import load_target
from tests.cases import covering


ROWS, WIDTH, LAYERS = 16384, 512, 2


def layer(h: Any, w: Any) -> Any:
    return h + jnp.tanh(h @ w["up"]) @ w["down"], None


def step_of(block: Any) -> Any:
    def step(params: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return jnp.mean(jax.lax.scan(block, x, params)[0] ** 2)

        grads = jax.grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step


plain, checkpointed = step_of(layer), step_of(jax.checkpoint(layer))


def plan_of(fn: Any = plain, **options: Any) -> rhino.Plan:
    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    params = {
        "up": shape(LAYERS, WIDTH, 4 * WIDTH),
        "down": shape(LAYERS, 4 * WIDTH, WIDTH),
    }
    fixed = {"hardware": "v5e:2x4", "progress": False, "level": "fast"}
    fixed["donate_argnums"] = 0
    return rhino.plan(fn, params, shape(ROWS, WIDTH), **fixed | options)


@pytest.mark.parametrize(
    "options",
    covering(
        [
            {"microbatches": 2},
            {"stages": 2, "schedule": "1f1b"},
            {"stages": 2, "schedule": "one-program", "microbatches": 4},
            {"microbatches": 1},
        ],
        2,
    ),
)
def test_lines_add_up_to_the_step(options: Any, tmp_path: Path) -> None:
    plan = plan_of(**options)
    step_s = plan.predicted.step_time_s
    assert sum(x.seconds for x in plan.line_times) == pytest.approx(step_s, rel=1e-6)
    sources = [x.source for x in plan.line_times]
    assert len(sources) == len(set(sources))
    # Forward and backward products are one line of the user's, and most of the step.
    products = [x for x in plan.line_times if x.matrix_s]
    (main,) = {x.source for x in products if x.source.endswith("(layer)")}
    assert main.startswith("test_by_line.py:")
    assert main in sources[:3]
    text = plan.table()
    assert "where the step's" in text and "matrix units" in text and "MFU" in text
    assert "where the step" in plan._repr_html_()
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert (loaded.line_times, loaded.mfu) == (plan.line_times, plan.mfu)


@pytest.mark.parametrize(
    ("fn", "options"),
    covering(
        [
            (checkpointed, {"recompute": "as written"}),
            (plain, {"stages": 2, "schedule": "1f1b"}),
            (plain, {}),
        ],
        1,
    ),
)
def test_utilisation_is_that_of_the_model(fn: Any, options: Any) -> None:
    plan = plan_of(fn, **options)
    # Forward, and the gradients of weights and of all layers' inputs but the first's.
    flops = 2 * ROWS * LAYERS * 2 * WIDTH * 4 * WIDTH
    at_most, at_least = 3 * flops, 3 * flops - flops / LAYERS
    assert at_least <= plan.model_flops.flops <= at_most
    peak = load_target("v5e").peak_flops_per_s("bfloat16")
    time_s = plan.predicted.step_time_s * 8 * peak
    assert plan.mfu == pytest.approx(plan.model_flops.flops / time_s)
    assert 0.05 < plan.mfu < 1
