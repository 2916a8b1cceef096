"""Plans that were saved before micro-batches kept rows of earlier loops to save one."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.errors import PlanFileError
from rhino_jax.ir.transform import MICROBATCHES, chosen
from rhino_jax.passes.staged.apart import take_apart
from rhino_jax.planner import cuts
from rhino_jax.planner.staging import cuts as staging


WIDTH, ROWS = 32, 64


def losses(params, batch):
    return jnp.square(jnp.tanh(batch @ params) - batch).mean(-1)


def hardest(params, batch):
    """Rows meet twice: in their maximum, and in a sum."""
    loss = jax.nn.logsumexp
    gradients = jax.grad(lambda params: loss(losses(params, batch)))(params)
    return params - 0.1 * gradients


def spread(params, batch):
    found = losses(params, batch)
    return jnp.mean((found - found.mean()) ** 2)


def arguments():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return 0.2 * rng.normal(size=shape).astype(np.float32)

    return normal(WIDTH, WIDTH), normal(ROWS, WIDTH)


@pytest.fixture
def in_three_loops(monkeypatch, tmp_path):
    """As a file of then: it does not say what it keeps."""

    def cut_in(count, places=()):
        return chosen(MICROBATCHES, {"count": count, "kept": 0.0})

    monkeypatch.setattr(cuts, "cut_in", cut_in)
    plan = rhino.plan(hardest, *arguments(), mesh={"data": 4}, microbatches=4)
    monkeypatch.undo()
    (cut,) = [t for t in plan.transforms if t.name == MICROBATCHES]
    then = replace(cut, choice='{"count": 4}')
    others = [then if t is cut else t for t in plan.transforms]
    return replace(plan, transforms=tuple(others)), then


def saved(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    return rhino.load_plan(tmp_path / "plan.json")


def test_a_plan_of_three_loops_is_applied(in_three_loops, tmp_path):
    plan, then = in_three_loops
    now = rhino.plan(hardest, *arguments(), mesh={"data": 4}, microbatches=4)
    counts = [t.ops_after for t in now.transforms if t.name == MICROBATCHES]
    assert counts != [then.ops_after]
    step = saved(plan, tmp_path).jit(hardest)
    got, expected = step(*arguments()), jax.jit(hardest)(*arguments())
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_a_pass_that_no_version_here_does_is_refused(in_three_loops, tmp_path):
    plan, then = in_three_loops
    other = replace(then, ops_after=then.ops_after + 1)
    passes = tuple(other if t is then else t for t in plan.transforms)
    plan = saved(replace(plan, transforms=passes), tmp_path)
    with pytest.raises(PlanFileError, match="'micro-batches' otherwise") as refused:
        plan.jit(hardest)(*arguments())
    assert f"{then.ops_after + 1} ops then" in refused.value.numbers
    assert "plan again" in refused.value.fix


@pytest.fixture
def in_two_loops(monkeypatch):
    monkeypatch.setattr(staging, "take_apart", functools.partial(take_apart, kept=0.0))
    mesh = {"stage": 2, "data": 2}
    plan = rhino.plan(spread, *arguments(), mesh=mesh, microbatches=4)
    monkeypatch.undo()
    return plan


def test_stages_of_then_are_applied(in_two_loops, tmp_path):
    plan = in_two_loops
    mesh = {"stage": 2, "data": 2}
    now = rhino.plan(spread, *arguments(), mesh=mesh, microbatches=4)
    assert plan.pipeline.between and not now.pipeline.between
    step = saved(plan, tmp_path).jit(spread)
    got, expected = step(*arguments()), jax.jit(spread)(*arguments())
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_stages_of_another_forward_pass_are_refused(in_two_loops, tmp_path):
    runs = (*in_two_loops.pipeline.runs, (1, 1))
    pipeline = replace(in_two_loops.pipeline, runs=runs)
    plan = saved(replace(in_two_loops, pipeline=pipeline), tmp_path)
    with pytest.raises(PlanFileError, match="cuts its micro-batches otherwise"):
        plan.jit(spread)(*arguments())
