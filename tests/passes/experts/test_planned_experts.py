"""Plans choose how tokens are sorted by expert, and keep the choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rhino_jax as rhino
from rhino_jax.ir.transform import EXPERTS


WIDTH, HIDDEN, CHOICES = 64, 32, 4


def layer(p: Any, x: Any) -> Any:
    weights, experts = lax.top_k(jax.nn.softmax(x @ p["router"]), CHOICES)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=p["up"].shape[0])
    y = jax.nn.silu(lax.ragged_dot(x[order // CHOICES], p["up"], sizes))
    y = lax.ragged_dot(y, p["down"], sizes) * weights.reshape(-1)[order][:, None]
    return x + jnp.zeros_like(x).at[order // CHOICES].add(y)


def step(p: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean(jnp.square(layer(p, layer(p, x))))

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, grads), value


def arguments(experts: int, tokens: int) -> Any:
    rng = np.random.default_rng(0)
    shapes = {
        "router": (WIDTH, experts),
        "up": (experts, WIDTH, HIDDEN),
        "down": (experts, HIDDEN, WIDTH),
    }
    p = {k: rng.normal(size=s).astype(np.float32) / 8 for k, s in shapes.items()}
    return p, rng.normal(size=(tokens, WIDTH)).astype(np.float32)


def planned(args: Any, **options: Any) -> Any:
    return rhino.plan(
        step, *args, mesh={"x": 8}, hardware="v5e:2x4", progress=False, **options
    )


def choices(plan: Any) -> list[Any]:
    return [t.chosen for t in plan.transforms if t.name == EXPERTS]


def test_many_tokens_stay_on_their_devices() -> None:
    args = arguments(experts=8, tokens=65536)
    plan = planned(args)
    assert choices(plan) == [{"count": 8, "parts": 1}]
    assert {v.name for v in plan.variants} == {
        "baseline",
        "tokens sorted in 8 blocks",
        "experts in 8 parts",
        "tokens sorted in 8 blocks, experts in 8 parts",
    }
    baseline, *others = sorted(plan.variants, key=lambda v: v.name != "baseline")
    assert min(v.step_time_s for v in others) < 0.97 * baseline.step_time_s
    assert any("sorted by expert on each device" in note for note in plan.notes)
    gathers = [c.reason for c in plan.collectives if c.kind == "all-gather"]
    assert all(reason.startswith("gathers p[") for reason in gathers)  # weights alone


def test_a_checkpoint_is_kept_where_experts_are_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{__name__}.CHOICES", 8)

    def checkpointed(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            y = jax.checkpoint(layer)(p, x)
            return jnp.mean(jnp.square(y).astype(jnp.float32))

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, b: (a - 0.1 * b).astype(a.dtype), p, grads), value

    shapes = {"router": (2048, 256), "up": (256, 2048, 512), "down": (256, 512, 2048)}
    p = {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct((65536, 2048), jnp.bfloat16)
    options: Any = {"mesh": {"x": 8}, "hardware": "tpu7x:2x2x1", "level": "fast"}
    plan = rhino.plan(checkpointed, p, x, progress=False, **options)
    assert [choice["parts"] for choice in choices(plan)] == [8]
    assert "un-remat" not in {t.name for t in plan.transforms}
    recipes = [r.step_time_s for r in plan.recipes.values() if r is not None]
    assert plan.predicted.step_time_s < 0.8 * min(recipes)


@pytest.mark.slow
def test_numbers_are_the_same_from_a_file(tmp_path: Path) -> None:
    args = arguments(experts=8, tokens=65536)
    plan = planned(args)
    plan.save(tmp_path / "plan.json")
    want = jax.jit(step)(*args)
    for each in (plan, rhino.load_plan(tmp_path / "plan.json")):
        got = each.jit(step)(*args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_as_written_sorts_all_together() -> None:
    plan = planned(arguments(experts=8, tokens=65536), grouped="as written")
    assert not choices(plan)
    assert [v.name for v in plan.variants] in ([], ["baseline"])


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 4])
def test_in_micro_batches(microbatches: int) -> None:
    args = arguments(experts=8, tokens=65536)
    plan = planned(args, microbatches=microbatches)
    assert plan.microbatches == microbatches
    assert choices(plan) == [{"count": 8, "parts": 1}]
    got, want = plan.jit(step)(*args), jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
