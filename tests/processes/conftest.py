"""Processes that the tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool
