"""Loops over layers in stages: unrolled where the compiler copies what they stack."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from rhino_jax.passes.staged.stacks import LayerStack, Unstacked


def layer(x: Any, w: Any) -> tuple[Any, None]:
    return x + jax.nn.gelu(x @ w["a"]) @ w["b"], None


def in_a_loop(p: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, p)[0]


def one_by_one(p: Any, x: Any) -> Any:
    for w in p:
        x, _ = layer(x, w)
    return x


def step_of(apply: Any) -> Any:
    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            return ((apply(p, x) - y) ** 2).mean()

        value, g = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, g), value

    return step


def shapes(layers: int, width: int, rows: int, *, stacked: bool) -> Any:
    def f(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "float32")

    def weights(*first: int) -> Any:
        return {name: f(*first, width, width) for name in "ab"}

    p = weights(layers) if stacked else [weights() for _ in range(layers)]
    return p, f(rows, width), f(rows, width)


def planned(apply: Any, args: Any, **options: Any) -> Any:
    options = {"stages": 2, "microbatches": 4, "hardware": "h100:8", **options}
    return rhino.plan(step_of(apply), *args, progress=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "stages"), [(8, 2), (6, 2)])
def test_a_loop_takes_no_longer_than_layers_one_by_one(
    layers: int, stages: int
) -> None:
    plans = [
        planned(apply, shapes(layers, 2048, 1 << 14, stacked=stacked), stages=stages)
        for apply, stacked in ((in_a_loop, True), (one_by_one, False))
    ]
    assert plans[0].pipeline.unrolled_trips and not plans[1].pipeline.unrolled_trips
    assert any("unrolled in every stage" in note for note in plans[0].notes)
    took = [plan.predicted.step_time_s for plan in plans]
    assert took[0] <= 1.03 * took[1]


@pytest.mark.slow
def test_other_hardware_and_users_keep_the_loops() -> None:
    args = shapes(4, 2048, 1 << 14, stacked=True)
    for options in ({"loops": "as written"}, {"hardware": "v5e:2x4"}):
        assert not planned(in_a_loop, args, **options).pipeline.unrolled_trips


@pytest.mark.slow
def test_unrolled_stages_run_and_are_loaded(tmp_path: Any) -> None:
    plan = planned(in_a_loop, shapes(4, 512, 4096, stacked=True), schedule="1f1b")
    assert plan.pipeline.unrolled_trips
    plan.save(tmp_path / "p.json")
    loaded = rhino.load_plan(tmp_path / "p.json")
    rng = np.random.default_rng(0)
    args = jax.tree.map(
        lambda x: 0.05 * rng.normal(size=x.shape).astype(x.dtype),
        shapes(4, 512, 4096, stacked=True),
    )
    step = step_of(in_a_loop)
    want = jax.tree.leaves(jax.jit(step)(*args))
    for run in (plan.jit(step), loaded.jit(step)):
        for got, expected in zip(jax.tree.leaves(run(*args)), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_parts_of_a_stack_are_unrolled() -> None:
    args = shapes(4, 8, 16, stacked=True)
    traced = trace(step_of(in_a_loop), args, {})
    stack = LayerStack(frozenset({0, 1}), (2, 2))
    closed, program = traced.closed_jaxpr, traced.program
    loops, none = (Unstacked.of(closed, program, [stack], n) for n in (0, 32))
    counts = [
        sum(op.name == "scan" for op in each.program.ops) for each in (loops, none)
    ]
    assert counts == [4, 0]
    assert [e.path for e in none.program.inputs] == [
        e.path for e in loops.program.inputs
    ]


def test_few_micro_batches_are_taken_where_they_are_faster() -> None:
    def forward(p: Any, x: Any) -> Any:
        return one_by_one(p, x)

    def count(rows: int) -> int:
        p, x, _ = shapes(4, 2048, rows, stacked=False)
        plan = rhino.plan(forward, p, x, stages=2, hardware="h100:8", progress=False)
        return int(plan.microbatches)

    assert count(64) == 1
    assert count(1 << 15) > 1


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (6, 3)])
def test_one_micro_batch_of_checkpointed_attention(
    layers: int, stages: int, causal: bool
) -> None:
    """Layers that sequence slices run whole are recomputed where they ran."""
    width, rows = 32, 64

    def attention(x: Any, w: Any) -> tuple[Any, None]:
        scores = jnp.einsum("bqd,bkd->bqk", x @ w["a"], x)
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones((rows, rows))) > 0, scores, -1e9)
        s = jax.nn.softmax(scores, -1)
        return x + jnp.einsum("bqk,bkd->bqd", s, x) @ w["b"], None

    def apply(p: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(attention), x @ p["i"], p["l"])
        return x @ p["o"]

    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return 0.06 * rng.normal(size=shape).astype(np.float32)

    stack = {name: draw(layers, width, width) for name in "ab"}
    p = {"l": stack, "i": draw(16, width), "o": draw(width, 16)}
    args = p, draw(1, rows, 16), draw(1, rows, 16)
    hardware = f"h100:{8 if stages == 2 else 6}"
    plan = planned(apply, args, stages=stages, microbatches="auto", hardware=hardware)
    assert plan.num_stages == stages
    assert plan.check(step_of(apply), *args).ok
