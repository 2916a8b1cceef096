"""Loops over layers unrolled: the same numbers, no stacks, and where it is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import rhino_jax as rhino
from rhino_jax._compat import jaxpr_consts, open_jaxpr
from rhino_jax.frontend.regions import inner_equations
from rhino_jax.frontend.trace import trace
from rhino_jax.ir.transform import MICROBATCHES, UN_REMAT, UNROLL, Transform, chosen
from rhino_jax.passes.apply import PASSES, apply_passes
from rhino_jax.passes.program_pass import NO_LIMITS


LAYERS, D = 3, 8
W = jax.random.normal(jax.random.key(0), (LAYERS, D, D)) / 3
X = jax.random.normal(jax.random.key(1), (4, D))


def layer(x: Any, w: Any) -> tuple[Any, Any]:
    return x + jnp.tanh(x @ w), jnp.sum(x)


def loss(w: Any, x: Any) -> Any:
    y, sums = jax.lax.scan(layer, x, w)
    return jnp.mean(y**2) + jnp.sum(sums * jnp.arange(LAYERS))


def from_the_last(w: Any, x: Any) -> Any:
    y, sums = jax.lax.scan(layer, x, w, reverse=True)
    return jnp.mean(y**2) + sums[0]


def in_a_function(w: Any, x: Any) -> Any:
    return jax.jit(loss)(w, x)


def accumulated(w: Any, x: Any) -> Any:
    """A loop over micro-batches around the loops over layers."""

    def one(total: Any, rows: Any) -> tuple[Any, None]:
        value, grads = jax.value_and_grad(loss)(w, rows)
        return (total[0] + value, total[1] + grads), None

    zeros = (jnp.zeros(()), jnp.zeros_like(w))
    return jax.lax.scan(one, zeros, x.reshape(2, 2, D))[0]


def with_dropout(w: Any, x: Any) -> Any:
    def body(carry: Any, w: Any) -> tuple[Any, None]:
        x, key = carry
        key, now = jax.random.split(key)
        kept = jax.random.bernoulli(now, 0.5, x.shape)
        return (x + jnp.where(kept, jnp.sin(x @ w), 0.0), key), None

    return jnp.sum(jax.lax.scan(body, (x, jax.random.key(7)), w)[0][0])


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(fn, (0, 1))


def scans(closed: Any) -> list[int]:
    eqns = inner_equations(closed)
    return [int(e.params["length"]) for e in eqns if e.primitive.name == "scan"]


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (gradients(loss), 0),
        (gradients(from_the_last), 0),
        (gradients(in_a_function), 0),
        (gradients(with_dropout), 0),
        (accumulated, 1),
    ],
    ids=["loss", "reverse", "in a function", "dropout", "in micro-batches"],
)
def test_unrolled_loops_give_the_same_numbers(
    fn: Callable[..., Any], left: int
) -> None:
    traced = trace(fn, (W, X), {})
    (choice,) = PASSES[UNROLL].choices(traced, NO_LIMITS)
    found = apply_passes(traced, [choice]).closed_jaxpr
    assert len(scans(found)) == left < len(scans(traced.closed_jaxpr))
    got = jax.core.eval_jaxpr(open_jaxpr(found), jaxpr_consts(found), W, X)
    for a, b in zip(got, jax.tree.leaves(fn(W, X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_stacks_that_only_loops_read_are_not_built() -> None:
    traced = trace(gradients(loss), (W, X), {})
    found = apply_passes(traced, [chosen(UNROLL, {"max_trips": LAYERS})])
    built = [
        found.program.values[op.results[0]].shape
        for op in found.program.ops
        if op.name in ("stack", "concatenate")
    ]
    # The sums that the loss reads, and the gradients of the layers' weights.
    assert built == [(LAYERS,), W.shape]


@pytest.mark.parametrize(
    ("fn", "max_trips"),
    [
        (loss, 32),  # no loop reads what it stacks
        (lambda w, x: jax.grad(lambda w: from_checkpoint(w, x))(w), 32),
    ],
    ids=["forward alone", "jax.checkpoint"],
)
def test_other_loops_stay(fn: Callable[..., Any], max_trips: int) -> None:
    assert not [*PASSES[UNROLL].choices(trace(fn, (W, X), {}), NO_LIMITS)]


def from_checkpoint(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, w)[0])


def test_a_long_loop_stays() -> None:
    many, fn = jnp.zeros((33, D, D)), gradients(from_the_last)
    assert not [*PASSES[UNROLL].choices(trace(fn, (many, X), {}), NO_LIMITS)]
    traced = trace(gradients(loss), (W, X), {})
    found = apply_passes(traced, [chosen(UNROLL, {"max_trips": LAYERS - 1})])
    assert scans(found.closed_jaxpr) == scans(traced.closed_jaxpr)


def test_loops_are_unrolled_where_the_compiler_copies_their_stacks() -> None:
    w = jax.ShapeDtypeStruct((4, 512, 512), "float32")
    x = jax.ShapeDtypeStruct((1024, 512), "float32")

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean(jax.lax.scan(layer, x, w)[0]))(w)

    def planned(hardware: str, **options: Any) -> Any:
        return rhino.plan(
            step, w, x, mesh={"data": 8}, hardware=hardware, progress=False, **options
        )

    plan = planned("h100:8")
    loops = plan.with_(loops="as written")
    assert [v.name for v in plan.variants if v.is_chosen] == ["unrolled"]
    assert plan.predicted.step_time_s < 0.97 * loops.predicted.step_time_s
    assert any("layers are unrolled" in note for note in plan.notes)
    assert not loops.variants and not planned("v5e:2x4").variants
    values = jnp.ones(w.shape) / 512, jnp.ones(x.shape)
    np.testing.assert_allclose(
        plan.jit(step)(*values), step(*values), rtol=1e-5, atol=1e-7
    )


def test_forward_and_backward_loops_read_the_same_slices() -> None:
    traced = trace(gradients(loss), (W, X), {})
    found = apply_passes(traced, [chosen(UNROLL, {"max_trips": LAYERS})]).program
    weights = found.inputs[0].value
    reads = [op for op in found.ops if weights in op.operands]
    assert len(reads) == LAYERS


def in_chunks(w: Any, x: Any) -> Any:
    """A sum over chunks that starts at a Python number."""
    u = jnp.tanh(x @ w[0])

    def part(total: Any, v: Any) -> tuple[Any, None]:
        return total + jnp.tanh(u @ v.T).sum(), None

    chunks = u.reshape(2, -1, u.shape[1])
    return jax.lax.scan(jax.checkpoint(part), 0.0, chunks)[0] / x.shape[0]


@pytest.mark.parametrize(
    ("fn", "micro_batches"), [(in_chunks, 0), (loss, 2), (from_checkpoint, 2)]
)
def test_passes_do_the_same_in_every_trace(
    fn: Callable[..., Any], micro_batches: int
) -> None:
    def step(w: Any, x: Any, rate: Any) -> Any:
        value, gradient = jax.value_and_grad(fn)(w, x)
        return w - rate * gradient, value

    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    done = [Transform(UN_REMAT, 0, 0, "all"), chosen(UNROLL, {"max_trips": 32})]
    if micro_batches:
        done.append(chosen(MICROBATCHES, {"count": micro_batches}))
    found = [
        apply_passes(trace(which, (W, X, rate), {}, mesh=around), done)
        for which in (step, jax.jit(step))
        for rate in (0.1, jnp.float32(0.1))
        for around in (None, mesh)
    ]
    assert len({str(each.closed_jaxpr) for each in found}) == 1


def test_layers_that_need_no_remat_are_unrolled() -> None:
    w = jax.ShapeDtypeStruct((4, 512, 512), "float32")
    x = jax.ShapeDtypeStruct((1024, 512), "float32")

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(from_checkpoint)(w, x)

    plan = rhino.plan(step, w, x, mesh={"data": 8}, hardware="h100:8", progress=False)
    assert [v.name for v in plan.variants if v.is_chosen] == ["no remat, unrolled"]
