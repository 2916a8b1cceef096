"""Random steps in micro-batches: equal, or refused."""

from __future__ import annotations

import pytest
import random_losses
from helpers_microbatch import outcome
from random_programs import arguments, step_of


def found(seed):
    # Half of the seeds: with values that may be made in full to save a loop.
    cheap = 4.0 * (seed % 2)
    return outcome(step_of(seed), arguments(seed), (0,), (4,), cheap)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_are_equal_or_refused(seed):
    assert right(found(seed))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6, 1006, 50))
def test_a_thousand_random_programs_are_equal_or_refused(first):
    bad = {s: what for s in range(first, first + 50) if not right(what := found(s))}
    assert not bad


# Between them: vmap, lax.map, lax.map of some rows; means, sums, masks; all optimizers.
@pytest.mark.parametrize("seed", (0, 1, 2, 5, 7, 8))
def test_losses_of_one_example_each_are_equal(seed):
    assert of_examples(seed) == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(9, 409, 50))
def test_hundreds_of_losses_of_one_example_each_are_equal(first):
    what = {seed: of_examples(seed) for seed in range(first, first + 50)}
    assert {s: w for s, w in what.items() if w != "equal"} == {}


def of_examples(seed):
    step, args = random_losses.step_of(seed)
    return outcome(step, args, (0, 1), counts=(3, 4), cheap=4.0)


def right(what):
    return what == "equal" or what.startswith("refused")
