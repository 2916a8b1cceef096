"""The cut that is found is the cheapest of all."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from rhino_jax.passes.deferred_reductions.sites import minimum_cut


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_is_cheaper(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 6
    edges = [
        (int(a), int(b), float(rng.integers(1, 9)) if rng.random() < 0.9 else math.inf)
        for a, b in rng.choice(2 + count, (14, 2))
        if a != b and (a, b) != (0, 1)
    ]

    def cost(side: tuple[bool, ...]) -> float:
        return sum(c for a, b, c in edges if side[a] and not side[b])

    sides = [(True, False, *s) for s in itertools.product([0, 1], repeat=count)]
    least = min(map(cost, sides))
    if math.isinf(least):
        with pytest.raises(ValueError, match="at no cost"):
            minimum_cut(edges)
        return
    near = minimum_cut(edges)
    found = tuple(node in near for node in range(2 + count))
    assert cost(found) == pytest.approx(least)
    assert sum(found) == min(sum(s) for s in sides if cost(s) == least)
