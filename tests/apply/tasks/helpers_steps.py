"""Steps run twice, and compared."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def two_steps(step, make, count=1):
    """Results of the second of two steps.

    Args:
      make: arguments, of which the first `count` are replaced by as many results.
    """
    mine = make()
    for _ in range(2):
        out = step(*mine)
        mine = (*out[:count], *mine[count:])
    return out


def assert_equal(got, expected):
    """To 1e-4, or far below the largest number of all: some gradients are noise."""
    most = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * most)
