"""Present devices that a mesh leaves out are noted, as absent ones are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import rhino_jax as rhino


def _notes(mesh: Any, **options: Any) -> list[str]:
    plan = rhino.plan(lambda x: jnp.tanh(x), jnp.ones((48, 48)), mesh=mesh, **options)
    return [note for note in plan.notes if "idle" in note]


@pytest.mark.parametrize(
    "mesh", [{"x": 3, "y": 2}, Mesh(np.array(jax.devices()[2:8]), ("x",))]
)
def test_devices_that_are_left_out(mesh: Any) -> None:
    count = len(jax.devices())
    (note,) = _notes(mesh)
    assert f"6 devices, {count} are present: {count - 6} stay idle" in note


def test_no_note_where_none_is_idle_or_hardware_is_named() -> None:
    assert not _notes({"x": len(jax.devices())})
    assert not _notes({"x": 2}, hardware="h100:1x2")
    (note,) = _notes({"x": 2}, hardware="h100:1x8")
    assert "6 stay idle" in note
