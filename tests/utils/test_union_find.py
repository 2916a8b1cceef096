"""Sets are those of the unions, each named by its smallest member."""

from __future__ import annotations

import numpy as np
import pytest

from rhino_jax.utils.union_find import DisjointSets, united


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


@pytest.mark.parametrize("seed", range(5))
def test_pairs_known_at_once_give_the_same_sets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # A long chain in any order, a star around a large number, and any pairs.
    chain = rng.permutation(200)
    star = np.stack([np.full(50, 499), np.arange(200, 250)])
    pairs = [np.stack([chain[1:], chain[:-1]]), star, rng.integers(250, 480, (2, 60))]
    a, b = rng.permuted(np.concatenate(pairs, axis=1), axis=0)
    sets = DisjointSets(500)
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        sets.union(x, y)
    assert united(500, a, b).tolist() == sets.names()
    assert united(3, a[:0], b[:0]).tolist() == [0, 1, 2]
