"""Meshes of emulated devices, and what "the same numbers" means."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType


def mesh_of(shape: tuple[int, ...]) -> jax.sharding.Mesh:
    names = ("x", "y", "z")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def plain(x: Any) -> np.ndarray:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def assert_same(single: Any, sharded: Any, atol: float = 1e-8) -> None:
    """Every array leaf agrees to 1e-4 of itself, 1e-5 of the leaf's largest, and atol.

    What is below 1e-8 is the rounding noise of a zero (a key bias under softmax).
    """
    assert jax.tree.structure(single) == jax.tree.structure(sharded)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(single),
        jax.tree.leaves(sharded),
        strict=True,
    )
    for (path, a), b in pairs:
        if not hasattr(a, "dtype"):
            assert a is b or a == b
            continue
        a, b = plain(a), plain(b)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        scale = float(np.abs(a).max(initial=0.0))
        np.testing.assert_allclose(
            b,
            a,
            rtol=1e-4,
            atol=1e-5 * scale + atol,
            err_msg=jax.tree_util.keystr(path),
        )
