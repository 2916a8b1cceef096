"""Every strategy of the model computes what one device computes.

Each rule's cases, forward and backward, and index ops with indices anywhere, on meshes
of one to three axes. Those of the day are others every day; RHINO_TEST_SEED repeats
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.behaviour.equations import Run, equations_of
from tests.cases import SEED
from tests.frontend.rule_cases import primitive
from tests.processes.one_device import ALL_CASES, INDEXED
from tests.processes.pool import Pool, wrong_of


UNCOMPILED = {"mulhi", "philox2x32", "philox4x32"}
"""XLA compiles none of them for several devices, however they are sharded: "Unable to
convert MHLO to StableHLO" (jax 0.10.2)."""

NAMES = sorted(ALL_CASES.keys() - UNCOMPILED)

PARTS = 12
"""A run of the slow tests has a third of them."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


def pooled(x: Any) -> Any:
    """Pooling by the maximum of every node's edges."""
    nodes = jnp.array([0, 2, 1, 2, 5, 5, 3, 0])
    return jnp.sin(jax.ops.segment_max(x, nodes, 8)).sum()


def test_lookups_with_rows_columns_and_indices_sharded() -> None:
    """Over three axes, with a result of which the rows are sharded by two."""
    x, sizes = np.random.default_rng(0).standard_normal((8, 6)).astype("f"), (2, 2, 2)
    for equation in equations_of(jax.grad(pooled), x, only="gather"):
        found = [
            s
            for s in equation.strategies(sizes)
            if all(s.cut) and len(s.results[0][0]) == 2
        ]
        assert len(found) == 6
        assert Run(equation, sizes).wrong(found) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_rule(pool: Pool, part: int) -> None:
    wrong = [
        text
        for name in NAMES[part::PARTS]
        if primitive(name) is not None  # in this version of JAX
        for text in wrong_of(pool, "rule", name, SEED, 8)
    ]
    assert not wrong, f"RHINO_TEST_SEED={SEED}"


@pytest.mark.slow
@pytest.mark.parametrize("name", INDEXED)
def test_indices_anywhere(pool: Pool, name: str) -> None:
    wrong = wrong_of(pool, "indices", name, SEED, 6)
    assert not wrong, f"RHINO_TEST_SEED={SEED}"
