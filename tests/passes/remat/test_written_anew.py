"""Where values are made again, and what else of a program changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.passes.remat.choice import RematChoice
from tests.passes.remat.saved import saved_values
from tests.passes.remat.stepped import (
    assert_same,
    interpreted,
    with_choice,
    workload,
)


def layers(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """Some layers, and what is left of x [B, D]."""
    for w in params:
        x = jnp.tanh(x @ w) * jnp.sin(x)
    return jnp.mean(jnp.square(x))


PARAMS = [np.eye(8, dtype=np.float32) * (i + 1) / 4 for i in range(3)]
BATCH = np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8)


def check(function: Any, *args: Any) -> tuple[Any, Any]:
    """Drop all that can be; the numbers stay."""
    traced = trace(function, args, {})
    kept = saved_values(traced.program)
    values = tuple(k.value for k in kept if k.lines)
    rewritten = with_choice(traced, RematChoice(recompute=values))
    arrays = jax.tree.leaves(args)
    assert_same(interpreted(rewritten)(*arrays), interpreted(traced)(*arrays))
    return traced, rewritten


def count(traced: Any, name: str) -> int:
    return sum(op.name == name for op in traced.program.ops)


def test_loops_over_micro_batches() -> None:
    """Forward and backward in the body of a loop, layers in loops inside of it."""

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> Any:
            return jnp.tanh(x @ w) * jnp.sin(x), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params)[0]))

    def step(params: jax.Array, batch: jax.Array) -> Any:
        def one(total: jax.Array, x: jax.Array) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x)
            return total + grads, value

        return jax.lax.scan(one, jnp.zeros_like(params), batch)

    args = np.stack(PARAMS), BATCH.reshape(4, 4, 8)
    traced, _ = check(step, *args)
    stacks = [k for k in saved_values(traced.program) if k.forward is not None]
    assert stacks and all(k.loop is not None for k in stacks)
    values = tuple(k.value for k in stacks if k.lines)
    rewritten = with_choice(traced, RematChoice(recompute=values))
    assert_same(interpreted(rewritten)(*args), interpreted(traced)(*args))
    assert count(rewritten, "tanh") == count(traced, "tanh") + 1


def test_two_gradients_one_after_the_other() -> None:
    def step(params: list[jax.Array], batch: jax.Array) -> Any:
        first = jax.grad(layers)(params, batch)
        moved = [p - 0.1 * g for p, g in zip(params, first, strict=True)]
        return jax.value_and_grad(layers)(moved, batch[::-1])

    check(step, PARAMS, BATCH)


def test_two_gradients_of_the_same() -> None:
    def step(params: list[jax.Array], batch: jax.Array) -> Any:
        first = jax.grad(layers)(params, batch)
        return first, jax.grad(layers)(params, batch[:8])

    check(step, PARAMS, BATCH)


def test_what_is_never_kept_is_made_of_what_is() -> None:
    """Only the last value is dropped: what it is made of is not kept for it."""
    traced = trace(jax.grad(layers), (PARAMS, BATCH), {})
    kept = saved_values(traced.program)
    largest = max((k for k in kept if k.lines), key=lambda k: k.lines)
    rewritten = with_choice(traced, RematChoice(recompute=(largest.value,)))
    assert len(rewritten.program.ops) == len(traced.program.ops) + largest.lines + 1


def test_few_barriers_and_old_names() -> None:
    traced, _ = workload("gpt-tiny-unrolled", num_layers=3)
    program = traced.program
    by_id = {v: op for op in program.ops for v in op.results}
    stream = tuple(
        v for v, op in by_id.items() if op.source.function == "block" and not op.call
    )
    values = tuple(k.value for k in saved_values(program) if k.value not in stream)
    rewritten = with_choice(traced, RematChoice(recompute=values, keep=stream))
    assert 0 < count(rewritten, "optimization_barrier") <= 3 * 3
    lines = {op.source.line for op in program.ops}
    assert {op.source.line for op in rewritten.program.ops} <= lines
    files = {op.source.file for op in rewritten.program.ops}
    assert not [file for file in files if "rhino_jax/passes" in file]


def test_effects_happen_once() -> None:
    def step(params: list[jax.Array], batch: jax.Array) -> Any:
        def loss(params: list[jax.Array]) -> jax.Array:
            x = jnp.tanh(batch @ params[0])
            jax.debug.callback(lambda _: None, x)
            return jnp.mean(jnp.sin(x @ params[1]))

        return jax.grad(loss)(params)

    traced, rewritten = check(step, PARAMS[:2], BATCH)
    assert count(rewritten, "debug_callback") == count(traced, "debug_callback") == 1


def test_choices_are_text() -> None:
    choice = RematChoice((1, 2), (3,), (), ((4, 5),), True)
    assert RematChoice.parse(str(choice)) == choice
    assert str(RematChoice()) == ""
    assert RematChoice.parse("") == RematChoice()


def test_parts_must_be_of_the_loop() -> None:
    traced, _ = workload("gpt-tiny", remat=False)
    stack = next(k for k in saved_values(traced.program) if k.forward is not None)
    assert stack.forward is not None
    choice = RematChoice((stack.value,), first=((stack.forward, 2),))
    with pytest.raises(AssertionError):
        with_choice(traced, choice)
