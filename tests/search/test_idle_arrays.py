"""Idle parts of systolic arrays in the prices of a plan."""

from __future__ import annotations

import jax
import pytest

import rhino_jax as rhino
from rhino_jax.hardware.files import load_target


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def test_few_features_take_as_long_as_fill_the_array() -> None:
    """No dim divides, and 15 of 128 columns are in use."""
    shapes = [(9, 65, 65, 257), (3, 3, 257, 15)]
    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes]
    target = load_target("v5e:2x2").replace(tile=(), hbm_bytes_per_s=1e15, launch_s=0.0)
    seconds = [
        rhino.plan(
            conv,
            *args,
            mesh={"x": 2},
            hardware=target.replace(systolic_array=side),
            progress=False,
        ).predicted.compute_s
        for side in (128, 0)
    ]
    summed = 257 * 3  # the other window dim's positions are products of their own
    times = -(-summed // 128) * 128 / summed * 128 / 15
    assert seconds[0] / seconds[1] == pytest.approx(times)
