"""Borders of neighbouring shards, against NumPy's padding of the whole."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

from rhino_jax.runtime.windows import with_halo


# (lower, upper), of shards of three elements: up to two neighbours on a side.
BORDERS = [(1, 2), (3, 0), (0, 0), (4, 7)]


def test_shards_receive_what_their_neighbours_hold() -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = np.arange(2 * 24, dtype=np.float32).reshape(2, 24)
    # Axes in the order of the mesh and in the other.
    cases = [(axes, *b) for axes in (("a", "b"), ("b", "a")) for b in BORDERS]

    @jax.jit
    def every(x: Any) -> list[Any]:
        return [
            jax.shard_map(
                lambda x, args=args: with_halo(x, 1, *args[1:], args[0]),
                mesh=mesh,
                in_specs=P(None, args[0]),
                out_specs=P(None, args[0]),
                check_vma=False,
            )(x)
            for args in cases
        ]

    for (_, lower, upper), got in zip(cases, every(x), strict=True):
        whole = np.pad(x, ((0, 0), (lower, upper)))
        width = 3 + lower + upper
        want = [whole[:, 3 * i : 3 * i + width] for i in range(8)]
        np.testing.assert_array_equal(got, np.concatenate(want, 1))
