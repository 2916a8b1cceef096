"""What planning does to the process it runs in."""

from __future__ import annotations

import gc

import pytest

from rhino_jax.errors import InfeasiblePlanError
from tests.search.zoo import planned


def test_garbage_is_collected_again_after_planning() -> None:
    met: list[bool] = []
    options = {"hardware": "v5e:4", "mesh": {"data": 4}}
    planned("mlp-tiny", **options, progress=lambda *_: met.append(gc.isenabled()))
    assert met and not any(met)
    assert gc.isenabled()
    with pytest.raises(InfeasiblePlanError):
        planned("mlp-tiny", **options, memory_budget_bytes=1)
    assert gc.isenabled()
    gc.disable()
    try:
        planned("mlp-tiny", **options)
        assert not gc.isenabled(), "who had it off finds it off"
    finally:
        gc.enable()
