"""With sums left open, plans send what programs written by hand do (CPU)."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from rhino_jax.runtime.spmd import SpmdExecutable
from tests.cases import covering
from tests.passes.deferred_reductions.cases import cases
from tests.passes.deferred_reductions.traffic import planned, sent_by_hand, sent_by_plan
from tests.passes.interpreter import interpret


AXES = (("x", 8),)


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", covering(cases(512, 1024)))
def test_plans_send_what_is_sent_by_hand(name: str, mesh) -> None:
    case = cases(512, 1024)[name]
    found = planned(case, AXES, "cpu:8")
    assert found.best.transforms[-1].name == "deferred reductions"
    assert found.best.predicted.step_time_s < found.first.predicted.step_time_s
    by_hand = sent_by_hand(case, mesh)
    assert sent_by_plan(found.again, found.best, mesh) < 1.05 * by_hand
    # If this falls, XLA:CPU leaves them open itself.
    assert sent_by_plan(found.traced, found.first, mesh) > 1.5 * by_hand


@pytest.mark.parametrize("name", covering(["accumulation", "q, k, v"]))
def test_results_are_those_of_one_device(name: str, mesh) -> None:
    case = cases(64, 64)[name]
    found = planned(case, AXES, "cpu:8")
    rng = np.random.default_rng(0)
    arrays = [
        (0.1 * rng.normal(size=x.shape)).astype(x.dtype)
        for x in jax.tree.leaves(case.args)
    ]
    executable = SpmdExecutable(found.again, found.best, mesh)
    placed = [
        jax.device_put(x, sharding)
        for x, sharding in zip(arrays, executable.in_shardings, strict=True)
    ]
    expected = interpret(found.traced.closed_jaxpr, arrays)
    for x, y in zip(executable.run(placed), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
