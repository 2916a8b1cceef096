"""The fingerprint changes with the program, and with nothing else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.plan.fingerprint import fingerprint


AXES = (("x", 2), ("y", 4))


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def base(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]


def of(fn: Any, *args: Any, axes: Any = AXES, **options: Any) -> str:
    return fingerprint(trace(fn, args, {}, **options).program, axes)


def test_it_is_stable() -> None:
    def moved(w: Any, x: Any) -> Any:
        # The same on other lines.
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]

    args = (f32(8, 8), f32(8, 8))
    first = of(base, *args)
    assert first == of(base, *args) == of(moved, *args)
    assert first == of(base, *args, donate_argnums=1)
    assert len(first) == 64


@pytest.mark.parametrize(
    ("fn", "shapes", "axes"),
    [
        (base, (8, 16), AXES),
        (base, (8, 8), (("x", 4), ("y", 2))),
        (base, (8, 8), (("x", 2), ("z", 4))),
        (lambda w, x: jax.lax.scan(
            lambda c, _: (jnp.tanh(c @ w), None), x, None, length=4)[0], (8, 8), AXES),
        (lambda w, x: jax.lax.scan(
            lambda c, _: (jnp.sin(c @ w), None), x, None, length=3)[0], (8, 8), AXES),
        (lambda v, x: base(v, x), (8, 8), AXES),
    ],
)  # fmt: skip
def test_it_sees_shapes_ops_lengths_paths_and_mesh(
    fn: Any, shapes: Any, axes: Any
) -> None:
    rows, cols = shapes
    args = (f32(rows, rows), f32(cols, rows))
    assert of(fn, *args, axes=axes) != of(base, f32(8, 8), f32(8, 8))
