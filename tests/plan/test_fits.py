from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.errors import PlanFileError
from rhino_jax.ir.program import Input, Program, Region, Value
from rhino_jax.plan.fits import check_fits
from tests.plan.samples import sample_plan


MESH = (("data", 4), ("model", 2))


def program(**shapes: tuple[int, ...]) -> Program:
    values = tuple(Value(i, s, "float32") for i, s in enumerate(shapes.values()))
    inputs = tuple(Input(i, path) for i, path in enumerate(shapes))
    ids = tuple(range(len(values)))
    return Program("train_step", values, (), inputs, (), Region(ids, (), ()))


def small_plan():
    plan = sample_plan()
    batch = plan.inputs[-1]
    labels = dataclasses.replace(batch, path="labels", shape=(64,))
    return dataclasses.replace(plan, inputs=(batch, labels))


def test_a_plan_fits_its_own_program_and_mesh() -> None:
    plan = sample_plan()
    check_fits(plan, plan.fingerprint, MESH)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ((("data", 2), ("model", 2)), "axis 'data' has size 2, was 4"),
        ((("data", 4),), "axis 'model' is missing"),
        ((*MESH, ("x", 2)), "axis 'x' is new"),
        (MESH[::-1], "another order"),
    ],
)
def test_another_mesh_is_refused(mesh, words: str) -> None:
    plan = sample_plan()
    with pytest.raises(PlanFileError, match="not for this mesh") as error:
        check_fits(plan, plan.fingerprint, mesh)
    assert words in error.value.where


def test_another_program_names_the_inputs_that_differ() -> None:
    with pytest.raises(PlanFileError, match="not for this program") as error:
        check_fits(
            small_plan(), "f" * 64, MESH, program=program(batch=(32, 128), extra=(2,))
        )
    assert "batch is float32[32,128], was float32[64,128]" in error.value.where
    assert "labels is missing" in error.value.where
    assert "extra is new" in error.value.where


def test_the_same_inputs_say_that_the_code_changed() -> None:
    same = program(batch=(64, 128), labels=(64,))
    with pytest.raises(PlanFileError, match="the function's code"):
        check_fits(small_plan(), "f" * 64, MESH, program=same)


def step(w, x, *, dims="ij,jk->ik", axis=0, more=False):
    y = jnp.einsum(dims, x, w).sum(axis)
    return y * 2.0 if more else y


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dims": "ij,kj->ik"}, "does otherwise than it did"),
        ({"axis": 1}, "`reduce_sum` -> float32[8] at test_fits.py"),
        ({"axis": 1}, "was `reduce_sum` -> float32[4] at test_fits.py"),
        ({"more": True}, "`mul` -> float32[4] at test_fits.py"),
    ],
)
def test_a_saved_plan_names_the_first_op_that_changed(tmp_path, options, says) -> None:
    w, x = np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)
    rhino.plan(step, w, x, mesh={"x": 2}, progress=False).save(tmp_path / "plan.json")
    changed = functools.partial(step, **options)
    with pytest.raises(PlanFileError, match="not for this program") as error:
        rhino.load_plan(tmp_path / "plan.json").jit(changed)(w, x)
    assert says in error.value.where
    assert "fingerprint" not in str(error.value)


def test_other_versions_are_named() -> None:
    plan = dataclasses.replace(sample_plan(), versions={"jax": "0.1"})
    with pytest.raises(PlanFileError, match="made with jax 0.1, this is"):
        check_fits(plan, "f" * 64, MESH)


def test_many_differences_are_cut() -> None:
    many = program(**{f"x{i}": (1,) for i in range(50)})
    with pytest.raises(PlanFileError, match="and 4[0-9] more"):
        check_fits(sample_plan(), "f" * 64, MESH, program=many)
