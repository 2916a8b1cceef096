"""Products of ragged groups on a compiler that masks and multiplies every group."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino


ROWS, WIDTH, HIDDEN, GROUPS = 1024, 256, 512, 4
X, Y, W = (2 * n for n in (ROWS * WIDTH, ROWS * HIDDEN, GROUPS * WIDTH * HIDDEN))


def forward(x: Any, w: Any, sizes: Any) -> Any:
    return jax.lax.ragged_dot(x, w, sizes)


def gradient(x: Any, w: Any, sizes: Any) -> Any:
    """The gradients by rows and by matrices of what is linear in both."""
    y = jnp.ones((ROWS, HIDDEN), jnp.bfloat16)
    return jax.vjp(lambda x, w: forward(x, w, sizes), x, w)[1](y)


def planned(fn: Any, hardware: str) -> Any:
    shapes = (ROWS, WIDTH), (GROUPS, WIDTH, HIDDEN)
    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes]
    sizes = jax.ShapeDtypeStruct((GROUPS,), "int32")
    asked = {"mesh": {"x": 1}, "hardware": hardware, "progress": False}
    return rhino.plan(fn, *args, sizes, level="fast", **asked).predicted


def test_every_group_is_multiplied_in_full_with_masked_rows() -> None:
    one = 2.0 * ROWS * WIDTH * HIDDEN
    found = planned(forward, "h100:1")
    assert found.flops_per_device == GROUPS * one
    assert found.peak_bytes == pytest.approx(X + W + Y + GROUPS * X, rel=0.01)
    both = planned(gradient, "h100:1")
    assert both.flops_per_device == 2 * GROUPS * one
    # By matrices: rows and what comes back, masked; by rows: that in another order of
    # dims; and the matrices moved.
    held = X + W + X + W + GROUPS * (X + 2 * Y)
    assert held <= both.peak_bytes <= 1.01 * (held + W + Y)


def test_a_kernel_that_skips_other_groups_multiplies_every_row_once() -> None:
    found = planned(forward, "v5e:1x1")
    assert found.flops_per_device == 2.0 * ROWS * WIDTH * HIDDEN
    assert found.peak_bytes == pytest.approx(X + W + Y, rel=0.01)
