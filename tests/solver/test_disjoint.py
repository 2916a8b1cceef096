"""Sets are those of the unions, each named by its smallest member."""

from __future__ import annotations

import numpy as np
import pytest

from rhino_jax.solver.disjoint import DisjointSets


@pytest.mark.parametrize("seed", range(3))
def test_sets_are_named_by_their_smallest(seed: int) -> None:
    rng, sets, names = np.random.default_rng(seed), DisjointSets(50), np.arange(50)
    for a, b in rng.integers(0, 50, (40, 2)).tolist():
        sets.union(a, b)
        low, high = sorted((int(names[a]), int(names[b])))
        names[names == high] = low
        assert sets.find(b) == names[b]
    assert sets.names() == names.tolist()
    assert 1 < len(set(names.tolist())) < 50
