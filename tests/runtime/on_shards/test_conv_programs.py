"""Random steps of convolutions, planned: the same numbers as on one device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from conv_programs import run_seeds

from tests.cases import covering


# A grouped gradient that is a partial sum; taps under strides; and groups that XLA did
# not compile.
SHORT = (17, 4, 2)


@pytest.mark.parametrize(
    "seeds",
    covering([SHORT, *(range(n, n + 12) for n in range(0, 240, 12))], 1, each=True),
    ids=str,
)
def test_random_convolutions_are_as_on_one_device(seeds: Sequence[int]) -> None:
    assert run_seeds(seeds) == {}
