"""Zeros that cuDNN multiplies with, and how it is called."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.analysis.convolutions import find_zero_taps
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.frontend.trace import trace


def _conv(x: Any, w: Any, stride: int, padding: Any, **options: Any) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), padding, dimension_numbers=numbers, **options
    )


def _transposed(x: Any, w: Any) -> jax.Array:
    return jax.lax.conv_transpose(x, w, (2, 2), "SAME")


PATCHES = {"stride": 16, "padding": "VALID"}
CASES = {
    # Shapes, options, and zeros forward and of the gradients by input and kernel.
    # 14 x 14 patches of 16 x 16.
    "patches": ((32, 224, 224, 3), (16, 16, 3, 8), PATCHES, (1, 1, 1)),
    # Six pixels are left over: paddings of 0 and -6, which cuDNN has not, are written.
    "left over": ((32, 230, 230, 3), (16, 16, 3, 8), PATCHES, (1, 222.9, 46_052)),
    # More patches than pixels in one.
    "small patches": (
        (8, 64, 64, 8),
        (4, 4, 8, 8),
        {"stride": 4, "padding": "VALID"},
        (1, 1, 1),
    ),
    "strides": (
        (8, 64, 64, 8),
        (3, 3, 8, 8),
        {"stride": 2, "padding": "SAME"},
        (1.02, 1, 1),
    ),
    "dilated": (
        (8, 32, 32, 8),
        (3, 3, 8, 8),
        {"stride": 1, "padding": "SAME", "rhs_dilation": (2, 2)},
        (1, 1, 1),
    ),
    "grouped": (
        (8, 65, 65, 8),
        (3, 3, 2, 8),
        {"stride": 2, "padding": "VALID", "feature_group_count": 4},
        (1, 4.1, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_zeros_of_a_convolution_and_its_gradients(name: str) -> None:
    image, kernel, options, expected = CASES[name]

    def loss(x: Any, w: Any) -> jax.Array:
        return (_conv(x, w, **options) ** 2).sum()

    found = _zeros(jax.value_and_grad(loss, (0, 1)), image, kernel)
    assert found[0] == pytest.approx(expected[0], rel=0.05)
    assert sorted(found[1:]) == pytest.approx(sorted(expected[1:]), rel=0.05)


def test_patches_of_one_dim_are_not_exchanged_with_their_kernel() -> None:
    """cuDNN is called for the gradient by the input, though the kernel is larger."""

    def fn(x: Any, w: Any) -> Any:
        numbers = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(
            x, w, (10,), "VALID", dimension_numbers=numbers
        ).sum()

    assert _zeros(jax.grad(fn, (0, 1)), (8, 60, 4), (10, 4, 8)) == [1.0] * 2


def test_a_transposed_convolution_multiplies_with_the_zeros_of_its_input() -> None:
    assert _zeros(_transposed, (8, 32, 32, 8), (2, 2, 8, 8)) == pytest.approx([4.0])


def _zeros(fn: Any, *shapes: tuple[int, ...]) -> list[float]:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    graph = inline_regions(trace(fn, tuple(args), {}).program)
    found = zip(graph.nodes, find_zero_taps(graph), strict=True)
    names = [(n.op.name if n.op else "", zeros) for n, zeros in found]
    return [zeros for name, zeros in names if name == "conv_general_dilated"]
