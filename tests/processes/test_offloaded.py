"""Values on the hosts of several processes: steps equal those of one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.processes import offloaded
from tests.processes.pool import Pool, results
from tests.processes.staged import sums


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["a_stage_each", "stages_over_all"])
def test_two_steps_are_those_of_one_device(pool: Pool, scenario: str) -> None:
    params, x = offloaded.deep_arrays()
    step, wanted = jax.jit(offloaded.deep_step), []
    for _ in range(offloaded.STEPS):
        params, loss = step(params, x)
        wanted.append(float(loss))
    found = results(pool.run(scenario, module="offloaded"))
    for losses, _, kinds in found:
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)
        assert kinds == ["device", "pinned_host"]
    parts = zip(sums(params), *(of for _, of, _ in found), strict=True)
    for want, *have in parts:
        there = [x for x in have if x is not None]
        np.testing.assert_allclose(there, [want] * len(there), rtol=1e-4)
