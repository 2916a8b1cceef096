"""Plans whose passes, or micro-batches in stages, are other ones in this version."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.errors import PlanFileError
from rhino_jax.ir.transform import MICROBATCHES


WIDTH, ROWS = 32, 64


def step(params, batch):
    def loss(params):
        return jnp.square(jnp.tanh(batch @ params) @ params - batch).mean()

    return params - 0.1 * jax.grad(loss)(params)


def arguments():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return 0.2 * rng.normal(size=shape).astype(np.float32)

    return normal(WIDTH, WIDTH), normal(ROWS, WIDTH)


def planned(**mesh):
    return rhino.plan(step, *arguments(), mesh=mesh, microbatches=4)


def saved(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    return rhino.load_plan(tmp_path / "plan.json")


def test_a_pass_that_rewrites_otherwise_is_refused(tmp_path):
    plan = planned(data=4)
    (then,) = [t for t in plan.transforms if t.name == MICROBATCHES]
    other = replace(then, ops_after=then.ops_after + 1)
    passes = tuple(other if t is then else t for t in plan.transforms)
    plan = saved(replace(plan, transforms=passes), tmp_path)
    with pytest.raises(PlanFileError, match="'micro-batches' otherwise") as refused:
        plan.jit(step)(*arguments())
    assert f"{then.ops_after + 1} ops then" in refused.value.numbers
    assert "plan again" in refused.value.fix


def test_stages_of_another_forward_pass_are_refused(tmp_path):
    plan = planned(stage=2, data=2)
    pipeline = replace(plan.pipeline, runs=(*plan.pipeline.runs, (1, 1)))
    plan = saved(replace(plan, pipeline=pipeline), tmp_path)
    with pytest.raises(PlanFileError, match="cuts its micro-batches otherwise"):
        plan.jit(step)(*arguments())
