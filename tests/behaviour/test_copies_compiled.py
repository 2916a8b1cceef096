"""What several ops read in one layout is brought there once, planned and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import rhino_jax as rhino
from tests.behaviour.test_compiled import wire_bytes


MESHES = {"x": (("x",), (8,)), "xy": (("x", "y"), (4, 2))}
ROW = P(None, "x")
BOTH = P(None, ("x", "y"))
SWAPPED = P("y", "x")


def two_sorts(x: Any) -> Any:
    return lax.sort(x, dimension=1), lax.sort(-x, dimension=1), x * 2


def two_matmuls(x: Any) -> Any:
    w = jnp.ones((128, 256))
    return x @ w, (x * 2) @ w


def three_matmuls(x: Any) -> Any:
    w = jnp.ones((128, 256))
    return x @ w, x @ (w + 1), x @ (w + 2)


def running_product(x: Any) -> Any:
    return jax.grad(lambda x: (lax.cumprod(x, 1) ** 2).sum())(x)


def rotation(x: Any) -> Any:
    return jnp.concatenate([x[:, 64:], x[:, :64]], 1) * x


def normalisation(x: Any) -> Any:
    def norm(x: Any) -> Any:
        centred = x - x.mean(1, keepdims=True)
        return ((centred * lax.rsqrt((centred**2).mean(1, keepdims=True))) ** 3).sum()

    return jax.grad(norm)(x)


def shifts(x: Any) -> Any:
    return x[:, 1:] - x[:, :-1], x[:, ::2]


def update(x: Any) -> Any:
    y = lax.dynamic_update_slice(x, x[:, :16] * 2, (0, 7))
    return y, lax.dynamic_update_slice(x, x[:, :16] * 3, (0, 9))


def branches(x: Any) -> Any:
    """A copy that one branch makes is not the other's, nor what is behind's."""
    y = lax.cond(x[0, 0] > 0, lambda x: lax.sort(x, dimension=1), lambda x: x, x)
    return y + lax.cumsum(x, 1)


@pytest.mark.parametrize(
    ("fn", "mesh", "pin"),
    [
        (two_sorts, "x", ROW),
        (two_sorts, "xy", BOTH),
        (two_matmuls, "x", ROW),
        (two_matmuls, "xy", SWAPPED),
        # To be cut by all axes along dim 0 takes two steps, each made once.
        (three_matmuls, "xy", ROW),
        (running_product, "x", ROW),
        pytest.param(running_product, "xy", BOTH, marks=pytest.mark.slow),
        (rotation, "xy", SWAPPED),
        (normalisation, "x", ROW),
        (shifts, "xy", ROW),
        (update, "xy", ROW),
        (branches, "x", ROW),
    ],
)
def test_copies_are_made_as_planned(
    fn: Callable[[Any], Any], mesh: str, pin: P
) -> None:
    names, sizes = MESHES[mesh]
    kinds = (AxisType.Auto,) * len(names)
    args = (jax.ShapeDtypeStruct((64, 128), "float32"),)
    plan = rhino.plan(
        fn,
        *args,
        mesh=jax.make_mesh(sizes, names, axis_types=kinds),
        hardware="cpu",
        pins={"x": pin},
        progress=False,
    )
    found = plan.verify(fn, *args)
    assert plan.collectives
    assert wire_bytes(found.collectives) == wire_bytes(plan.collectives)
