"""Plans stack the work of an optimizer on many leaves where that is faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.ir.transform import STACKED
from tests.passes.stacked import updates


STEP = updates.step_of(updates.orthogonalized)


def arguments(d: int, rows: int, layers: int = 4) -> Any:
    w = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((*(d * n // 4 for n in a.shape),), jnp.float32),
        updates.weights(layers, 4, 8),
    )
    S = jax.ShapeDtypeStruct
    return w, w, S((rows, d), jnp.float32), S((), jnp.float32)


def planned(args: Any, **options: Any) -> Any:
    options = {"mesh": {"x": 8}, "hardware": "h100:8", "level": "fast"} | options
    return rhino.plan(STEP, *args, donate_argnums=(0, 1), progress=False, **options)


def sizes(plan: Any) -> list[Any]:
    return [t.chosen["sizes"] for t in plan.transforms if t.name == STACKED]


def test_taken_where_it_pays() -> None:
    """Each device has one of eight wide matrices; all enter and leave once."""
    args = arguments(2048, 16384)
    plan = planned(args)
    assert sizes(plan) == [[8, 8]]
    baseline, stacked = sorted(plan.variants, key=lambda v: v.step_time_s)[::-1]
    assert (baseline.name, stacked.name) == ("baseline", "stacked")
    assert stacked.step_time_s < 0.9 * baseline.step_time_s
    assert any("stacks='as written'" in note for note in plan.notes)
    assert not sizes(planned(args, stacks="as written"))
    assert not sizes(plan.with_(stacks="as written"))


def test_not_taken_where_the_model_takes_the_time() -> None:
    plan = planned(arguments(512, 2**22))
    assert "stacked" in [v.name for v in plan.variants] and not sizes(plan)


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_numbers_are_the_same_from_a_file(tmp_path: Path, microbatches: int) -> None:
    mesh = {"x": 4}
    plan = planned(arguments(64, 32, layers=2), microbatches=microbatches, mesh=mesh)
    assert plan.microbatches == microbatches and sizes(plan) == [[4, 4]]
    plan.save(tmp_path / "plan.json")
    w = updates.weights(2, 64, 128)
    m = jax.tree.map(np.ones_like, w)
    args = w, m, updates.batch(32, 64), np.float32(1)
    want = jax.jit(STEP)(*args)
    for each in (plan, rhino.load_plan(tmp_path / "plan.json")):
        got = each.jit(STEP)(*jax.tree.map(jnp.array, args))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    assert plan.check(STEP, *args).ok
