"""Plans as rhino makes them: specs in the shape of the arguments, save, load, run."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import PlanFileError


MESH = {"data": 4, "model": 2}


def init():
    return {"w1": jnp.ones((64, 128)), "w2": jnp.ones((128, 64)), "act": "tanh"}


def loss(params, batch, *, scale):
    act = getattr(jnp, params["act"])
    y = act(batch["x"] @ params["w1"] / 64) @ params["w2"] / 128
    return jnp.mean((y * scale - batch["x"]) ** 2)


ARGS = (init(), {"x": jnp.ones((32, 64)), "none": None})


def is_spec(x) -> bool:
    return x is None or isinstance(x, P)


@pytest.fixture(scope="module")
def plan():
    return rhino.plan(loss, *ARGS, scale=jnp.float32(2.0), mesh=MESH, level="fast")


def test_specs_have_the_shape_of_the_call(plan) -> None:
    args, kwargs = plan.in_specs
    assert set(args[0]) == {"w1", "w2", "act"}
    assert args[0]["act"] is None
    assert isinstance(args[0]["w1"], P) and isinstance(args[1]["x"], P)
    assert kwargs == {"scale": P()}
    assert plan.out_specs == P()


def test_shardings_place_the_arguments(plan) -> None:
    (params, batch), _ = plan.in_shardings
    x = jax.device_put(ARGS[1]["x"], batch["x"])
    assert x.sharding.mesh.axis_names == ("data", "model")
    assert params["act"] is None


def test_a_saved_plan_runs_as_the_one_that_was_made(plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.in_specs == plan.in_specs
    assert plan.diff(loaded).is_empty
    found = loaded.jit(loss)(*ARGS, scale=jnp.float32(2.0))
    expected = loss(*ARGS, scale=jnp.float32(2.0))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_saved_plan_refuses_another_program(plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    longer = {"x": jnp.ones((64, 64)), "none": None}
    with pytest.raises(PlanFileError, match="was float32\\[32,64\\]"):
        loaded.jit(loss)(ARGS[0], longer, scale=jnp.float32(2.0))


def test_positional_arguments_alone_are_the_tuple() -> None:
    plan = rhino.plan(jnp.dot, jnp.ones((8, 8)), jnp.ones((8, 8)), mesh=MESH)
    assert isinstance(plan.in_specs, tuple) and len(plan.in_specs) == 2
    assert all(is_spec(x) for x in plan.in_specs)
