"""Random train steps, planned with options at random, equal one device.

Those of the day are others every day; RHINO_TEST_SEED repeats them, and
RHINO_TEST_STEPS says how many of each kind a test runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.behaviour.random_steps import KINDS, wrong_step
from tests.cases import SEED
from tests.processes.pool import Pool, wrong_of


STEPS = int(os.environ.get("RHINO_TEST_STEPS", "4"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


# In stages: of seed 7 no op of the forward pass is left for them, and slices of seed 53
# would pass over the model against its order. A stage of seed 910055 recomputes from a
# scalar that a loop carries; of 910194 two chunks of a submesh read one value, and
# nothing else orders them. Of 20261129151 XLA:CPU ran no FFT with a dim of 1.
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *((kind, 0) for kind in KINDS),
        *(
            pytest.param("options", seed, marks=pytest.mark.slow)
            for seed in (7, 53, 910055, 910194, 20261129151)
        ),
    ],
)
def test_a_step_is_planned_and_run(kind: str, seed: int) -> None:
    assert wrong_step(kind, seed) is None


@pytest.mark.slow
def test_sums_over_micro_batches_are_not_recomputed() -> None:
    assert wrong_step("options", 253, microbatches=2) is None


# Neighbours are in different turns: every run of the slow tests has some of each kind.
@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_the_day(pool: Pool, kind: str, part: int) -> None:
    first = 1000 * SEED + STEPS * part
    assert wrong_of(pool, "steps", kind, first, STEPS) == []
