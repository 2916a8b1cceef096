"""Loops that data may end: one trip count for the plan and its compiled program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from tests.cases import covering


ARRAYS = (
    jax.ShapeDtypeStruct((65536, 512), jnp.float32),
    jax.ShapeDtypeStruct((65536,), jnp.float32),
)


def bounded(k: Any, a: Any) -> Any:
    """Ends at a tolerance, or after 40 trips."""

    def step(c: Any) -> Any:
        w = k @ (k.T @ c[0])
        norm = jnp.linalg.norm(w)
        return w / norm, norm, jnp.abs(norm - c[1]), c[3] + 1

    def goes_on(c: Any) -> Any:
        return (c[3] < 40) & (c[2] > 1e-6)

    return jax.lax.while_loop(goes_on, step, (a, 0.0, jnp.inf, 0))[:2]


def unbounded(k: Any, a: Any) -> Any:
    """Scales rows and columns until they stay."""

    def step(c: Any) -> Any:
        scaled = a / (k @ (1 / (k.T @ c[0])))
        return scaled, jnp.abs(scaled - c[0]).max()

    return jax.lax.while_loop(lambda c: c[1] > 1e-3, step, (a, jnp.inf))[0]


def twice(k: Any, a: Any) -> Any:
    """Two loops on one line, with bounds of their own."""

    def run(u: Any, most: int) -> Any:
        def goes_on(c: Any) -> Any:
            return (c[1] > 1e-3) & (c[2] < most)

        def step(c: Any) -> Any:
            return k @ (k.T @ c[0]), c[0].max(), c[2] + 1

        return jax.lax.while_loop(goes_on, step, (u, jnp.inf, 0))[0]

    return run(run(a, 5), 50)


def plan_of(fn: Any, **options: Any) -> rhino.Plan:
    return rhino.plan(fn, *ARRAYS, mesh={"x": 8}, hardware="h100:8", **options)


@pytest.mark.parametrize(
    ("fn", "stated", "expected"),
    covering(
        [
            (unbounded, {"test_while_trips.py:1": 33}, None),
            (unbounded, {"unbounded": 33}, [(33, "stated")]),
            (bounded, None, [(40, "bound")]),
            (unbounded, None, [(10, "assumed")]),
            (bounded, 3, [(3, "stated")]),
            (twice, None, [(5, "bound"), (50, "bound")]),
        ],
        2,
    ),
)
def test_the_compiled_program_counts_as_the_plan(
    fn: Any, stated: Any, expected: Any
) -> None:
    if expected is None:
        with pytest.raises(rhino.RhinoError, match="no `while` loop that data may end"):
            plan_of(fn, while_trips=stated)
        return
    plan = plan_of(fn, while_trips=stated)
    assert [(x.trip_count, x.basis) for x in plan.while_loops] == expected
    assert "that data may end" in plan.table()
    verified = plan.verify(fn, *ARRAYS, compile_for="cpu")
    assert verified.ok and not verified.differences
    counts = sorted(c.count for c in verified.collectives)
    assert counts == sorted(count for count, _ in expected)


def test_stated_counts_price_the_step_and_survive_a_file(tmp_path: Path) -> None:
    few, many = (plan_of(bounded, while_trips=n) for n in (10, 20))
    ratio = many.predicted.step_time_s / few.predicted.step_time_s
    assert 1.8 < ratio < 2.1
    many.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.while_loops == many.while_loops
    verified = loaded.verify(bounded, *ARRAYS, compile_for="cpu")
    assert {c.count for c in verified.collectives} == {20}


def test_micro_batches_keep_stated_counts() -> None:
    def step(w: Any, x: Any, count: Any) -> Any:
        def loss_of(w: Any) -> Any:
            def settle(c: Any) -> Any:
                return jnp.tanh(c[0] @ jax.lax.stop_gradient(w) + x), c[1] + 1

            z, _ = jax.lax.while_loop(lambda c: c[1] < count, settle, (x, 0))
            return jnp.mean((jax.lax.stop_gradient(z) @ w) ** 2)

        return w - jax.grad(loss_of)(w)

    shapes = (
        jax.ShapeDtypeStruct((256, 256), jnp.float32),
        jax.ShapeDtypeStruct((4096, 256), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    options: dict[str, Any] = {"mesh": {"x": 8}, "hardware": "h100:8", "level": "fast"}
    compute_s = [
        rhino.plan(
            step, *shapes, microbatches=2, while_trips=n, **options
        ).predicted.compute_s
        for n in (10, 1000)
    ]
    assert compute_s[1] > 20 * compute_s[0]


def test_counts_that_mean_nothing_are_refused() -> None:
    for value in (-1, 1.5, "a", {"bounded": "a"}, {1: 2}, {}):
        with pytest.raises(rhino.RhinoError, match="while_trips"):
            plan_of(bounded, while_trips=value)
