"""The zoo in micro-batches: the same numbers as undivided, or refused."""

from __future__ import annotations

import jax
import pytest
from helpers_microbatch import check

from rhino_jax.models import registry


@pytest.mark.parametrize("name", ["mlp-tiny", "gpt-tiny-unrolled", "gpt-tiny"])
def test_numbers_are_those_of_the_undivided_step(name):
    workload = registry.get(name, optimizer="sgd")
    args = workload.make_args(jax.random.key(0))
    check(workload.step, args, workload.donate_argnums, (2, 3))
