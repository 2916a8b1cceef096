"""What is done to a program before it is planned, and told of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from rhino_jax.ir.transform import Transform


X = jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)


def names(fn: Any, *args: Any) -> list[str]:
    return [t.name for t in trace(fn, args, {}).program.transforms]


def plain(x: Any) -> Any:
    return jnp.tanh(x)


def with_dead_code(x: Any) -> Any:
    jnp.exp(x).sum()
    return jnp.tanh(x)


def with_merged_dims(x: Any, w: Any) -> Any:
    return (x.reshape(-1, 32) @ w).reshape(8, 16, 32)


def with_a_reference(x: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(()))
    ref[...] += x.sum()
    return x * ref[...]


def test_what_changes_nothing_is_not_told() -> None:
    assert trace(plain, (X,), {}).program.transforms == ()


def test_dead_code_is_told_with_what_it_took() -> None:
    program = trace(with_dead_code, (X,), {}).program
    assert program.transforms == (Transform("dead code", 3, 1),)
    assert len(program.ops) == 1


def test_every_pass_is_told_in_order() -> None:
    w = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    assert names(with_merged_dims, X, w) == ["merged dims"]
    assert names(with_a_reference, X)[0] == "references as values"


def test_they_stand_in_the_plan_and_are_no_part_of_what_it_fits() -> None:
    options = {"mesh": {"a": 8}, "hardware": "cpu", "progress": False}
    found, same = (rhino.plan(fn, X, **options) for fn in (with_dead_code, plain))
    assert found.transforms == (Transform("dead code", 3, 1),)
    assert same.transforms == () and same.decisions == found.decisions
    found.jit(plain)(jnp.ones(X.shape))
