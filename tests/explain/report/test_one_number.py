"""One plan, one number: wherever a plan's own step stands, it is the predicted one."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.units import format_seconds
from tests.cases import covering


WIDTH, LAYERS = 256, 4


def step(params: Any, x: Any) -> Any:
    def loss_of(params: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))


def plan_of(**options: Any) -> rhino.Plan:
    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    weights = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {name: shape(LAYERS, *dims) for name, dims in weights.items()}
    fixed = {"hardware": "v5e:2x4", "donate_argnums": 0, "progress": False}
    return rhino.plan(step, params, shape(32768, WIDTH), **fixed, **options)


@pytest.mark.parametrize(
    "options",
    covering(
        [
            {"memory_budget_bytes": "60MiB", "level": "fast"},
            {"memory_budget_bytes": "60MiB"},
            {},
            {"stages": 2, "schedule": "one-program", "level": "fast"},
            {"stages": 2, "schedule": "1f1b", "level": "fast"},
        ],
        2,
    ),
)
def test_marked_rows_have_the_step_of_the_plan(options: Any) -> None:
    plan = plan_of(**options)
    own = format_seconds(plan.predicted.step_time_s)
    assert f"{own}/step" in str(plan)
    if "memory_budget_bytes" in options:
        assert any(v.is_chosen for v in plan.variants) and len(plan.meshes) > 1
    text = plan.table()
    marked = [line for line in text.splitlines() if line.startswith(">")]
    assert all(re.search(rf" {re.escape(own)}(  |$)", line) for line in marked), text
    (objective,) = [x for x in text.splitlines() if x.startswith("  objective")]
    assert own in objective
    if plan.pipeline is not None:
        simulated_s = plan.simulate().step_time_s
        assert simulated_s == pytest.approx(plan.predicted.step_time_s, rel=1e-6)


def test_rows_of_the_peak_show_the_shard_that_takes_their_bytes() -> None:
    plan = plan_of(mesh={"data": 4, "model": 2}, level="fast")
    specs = {leaf.path: leaf for leaf in plan.inputs}
    text = plan.table(full=True)
    one = [h for h in plan.at_peak if " × " not in h.what and "resharded" not in h.what]
    assert len(one) > 5
    for held in one:
        dims = [int(d) for d in re.findall(r"\d+", held.shard.partition("[")[2])]
        assert held.shard.startswith("f32[")
        assert math.prod(dims) * 4 <= held.bytes < 2.1 * math.prod(dims) * 4 + 4096
        assert held.shard in text
        if held.what in specs:
            assert held.bytes == specs[held.what].bytes_per_device
    assert any("'data'" in held.spec for held in one)
