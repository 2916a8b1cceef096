"""Several restrictions of one problem, minimised together."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from rhino_jax.search import within
from rhino_jax.search.pool import EFFORTS, RECIPE_EFFORTS
from rhino_jax.search.restriction import Restrictions
from tests.search.brute_force import best_by_enumeration
from tests.search.test_engine import random_problem


def random_restrictions(
    seed: int, kinds: np.ndarray, sizes: list[int], share: float
) -> tuple[Restrictions, np.ndarray]:
    """Four of them, and what they permit: [restrictions, options of all kinds]."""
    rng = np.random.default_rng(seed)
    first = np.cumsum(sizes) - sizes
    permitted = rng.random((4, sum(sizes))) < share
    permitted[:, first + rng.integers(np.array(sizes))] = True
    return Restrictions.of(permitted, first, kinds), permitted


@pytest.mark.parametrize("seed", range(4))
def test_restrictions_turn_choices_there_and_back(seed: int) -> None:
    sizes, kinds = [3, 1, 5], np.array([2, 0, 0, 1, 2])
    left, permitted = random_restrictions(seed, kinds, sizes, 0.5)
    for row in range(4):
        every = [
            np.flatnonzero(permitted[row, left.first[k] : left.first[k] + sizes[k]])
            for k in kinds
        ]
        for node, options in enumerate(every):
            places = left.options[node][row]
            assert places[: len(options)].tolist() == options.tolist()
            assert (places[len(options) :] == options[-1]).all(), "the last is repeated"
        for choice in itertools.product(*(range(len(o)) for o in every)):
            whole = left.expand(row, np.array(choice))
            assert whole.tolist() == [o[k] for o, k in zip(every, choice, strict=True)]
            assert left.contract(row, whole).tolist() == list(choice)
        gone = [
            sorted({*range(sizes[k])} - {*o.tolist()})
            for k, o in zip(kinds, every, strict=True)
        ]
        for node, options in enumerate(gone):
            for option in options:
                whole = left.expand(row, np.zeros(len(kinds), np.int64))
                whole[node] = option
                assert left.contract(row, whole)[node] == -1
    assert left.options[0] is left.options[4], "nodes of a kind share an array"


@pytest.mark.parametrize("most_at_once", [0, 60, within.MOST_AT_ONCE])
@pytest.mark.parametrize("seed", range(8))
def test_every_restriction_gets_its_cheapest(
    seed: int, most_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(within, "MOST_AT_ONCE", most_at_once)
    problem = random_problem(seed, np.inf)
    sizes = [len(c) for c in problem.costs]
    kinds = np.arange(len(sizes))
    left, permitted = random_restrictions(seed, kinds, sizes, 0.6)
    starts = np.zeros((4, len(sizes)), np.int64)
    found = within.cheapest_within(problem, left, starts, EFFORTS["best"])
    for row, labels in enumerate(found):
        assert (left.contract(row, labels) >= 0).all()
        forbidden = np.split(np.where(permitted[row], 0.0, np.inf), left.first[1:])
        costs = [c + f for c, f in zip(problem.costs, forbidden, strict=True)]
        best = best_by_enumeration(problem.recharged(costs, problem.edges))
        assert problem.objective(labels) == pytest.approx(best)


def test_one_that_allows_more_is_never_dearer() -> None:
    for seed in range(12):
        problem = random_problem(seed, np.inf)
        sizes = [len(c) for c in problem.costs]
        left, permitted = random_restrictions(seed, np.arange(len(sizes)), sizes, 0.4)
        permitted = np.logical_or.accumulate(permitted)
        left = Restrictions.of(permitted, left.first, left.kinds)
        starts = np.zeros((4, len(sizes)), np.int64)
        found = within.cheapest_within(
            problem, left, starts, RECIPE_EFFORTS["fast"], math.inf
        )
        costs = [problem.objective(labels) for labels in found]
        assert all(a >= b - 1e-9 for a, b in itertools.pairwise(costs))


def test_what_keeps_to_a_restriction_is_no_cheaper_elsewhere() -> None:
    """A search that climbs once finds less: what another finds is taken over."""
    taken = 0
    for seed in range(30):
        problem = random_problem(seed, np.inf)
        sizes = [len(c) for c in problem.costs]
        left, _ = random_restrictions(seed, np.arange(len(sizes)), sizes, 0.8)
        starts = np.zeros((4, len(sizes)), np.int64)
        effort = replace(RECIPE_EFFORTS["fast"], max_starts=1)
        found = within.cheapest_within(problem, left, starts, effort, worth=0.0)
        for row, labels in enumerate(found):
            for other in found:
                if (left.contract(row, other) >= 0).all():
                    assert problem.objective(labels) <= problem.objective(other)
                    taken += bool((labels == other).all())
    assert taken > 30 * 4
