"""What arrays take in tiles: by hand, by trying every layout, and by XLA:TPU."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from rhino_jax.cost.compute import tile_padding
from tests.verify.extras import mesh_of_target


TPU = (8, 128)

PADDED = [
    ((8, 16, 16, 32, 16), "float32", 4),
    ((16, 64, 1024), "bfloat16", 1),
    ((64, 1000, 80), "bfloat16", 1024 / 1000),
    ((1024, 3), "float32", 4 / 3),
    ((1024, 1), "float32", 1),
    ((1024, 1), "bfloat16", 2),
    ((3, 1024), "bfloat16", 4 / 3),
    ((50, 77), "int8", 56 * 128 / (50 * 77)),
    ((128, 5), "bool", 8 / 5),
    ((2, 3, 5), "float32", 128 / 5),
    ((16,), "float32", 8),
    ((256,), "float32", 1),
    ((1000,), "float32", 1024 / 1000),
    ((1100,), "float32", 2048 / 1100),
]


@pytest.mark.parametrize(("shape", "dtype", "times"), PADDED)
def test_padding_of_one_array(shape: tuple, dtype: str, times: float) -> None:
    item_bytes = jnp.dtype(dtype).itemsize
    assert tile_padding(shape, item_bytes, TPU) == pytest.approx(times)
    assert tile_padding(shape, item_bytes, ()) == 1


@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 128)])
def test_what_holds_nothing_or_one_element_is_not_padded(shape: tuple) -> None:
    assert tile_padding(shape, 4, TPU) == 1


@pytest.mark.parametrize(
    ("off_lanes", "times"),
    [((), 4), ((3,), 8), ((2, 3), 8), ((1, 2, 3, 4), 16), ((0, 1, 2, 3, 4), 4)],
)
def test_dims_that_lie_on_no_lanes(off_lanes: tuple, times: float) -> None:
    """Where all are barred, one has to lie there all the same."""
    assert tile_padding((8, 16, 16, 32, 8), 4, TPU, off_lanes) == times


@given(
    shape=st.lists(st.integers(1, 300), min_size=2, max_size=4),
    item_bytes=st.sampled_from([1, 2, 4]),
)
def test_no_order_of_dims_pads_less(shape: list[int], item_bytes: int) -> None:
    least = math.inf
    for order in itertools.permutations(shape):
        *rest, second, minor = order
        fewest = [r for r in (1, 2, 4, 8) if r >= 4 // item_bytes]
        rows = next((r for r in fewest if r >= second), 8)
        held = math.prod(rest) * -(-second // rows) * rows * -(-minor // 128) * 128
        least = min(least, held / math.prod(shape))
    assert tile_padding(tuple(shape), item_bytes, TPU) == pytest.approx(least)


@pytest.mark.compile_only
@pytest.mark.parametrize("target", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_compiler_holds_arguments_in_such_tiles(target: str) -> None:
    mesh = mesh_of_target(target)
    whole = NamedSharding(mesh, PartitionSpec())
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype, _ in PADDED
    ]
    step = jax.jit(lambda *args: [x * x for x in args], out_shardings=whole)
    memory = step.lower(*args).compile().memory_analysis()
    expected = [
        math.prod(shape) * jnp.dtype(dtype).itemsize * times
        for shape, dtype, times in PADDED
    ]
    assert memory.argument_size_in_bytes == pytest.approx(sum(expected))
