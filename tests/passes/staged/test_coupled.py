"""Steps in stages whose micro-batches are coupled by values of the whole batch."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from helpers_coupled import STEPS, arguments

from rhino_jax._compat import open_jaxpr
from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import trace
from rhino_jax.passes.staged.apart import take_apart
from rhino_jax.passes.staged.sides import sides_of
from rhino_jax.passes.staged.staging import staged
from rhino_jax.passes.staged.step import TaskKind, ValueKind
from tests.cases import covering
from tests.passes.staged.helpers_staged import check, of_zoo, run_tasks, taken_apart
from tests.passes.zoo import random_like


NAMES = [name for name in STEPS if name != "centred"]


@functools.cache
def traced_step(name):
    args = random_like(jax.eval_shape(arguments))
    traced = trace(STEPS[name], args, {}, donate_argnums=(0,))
    return traced, jax.tree.leaves(args)


def tasks_of(step, *kinds):
    return [t for tasks in step.tasks for t in tasks if t.kind in kinds]


@pytest.mark.parametrize(
    ("name", "stages", "is_compiled"),
    covering(
        [
            *((name, stages, False) for name in NAMES for stages in (2, 4)),
            *((name, 2, True) for name in NAMES),
        ],
        lambda case: not case[-1],
    ),
)
def test_coupled_steps_are_the_same_in_stages(name, stages, is_compiled):
    step = check(*traced_step(name), stages, 4, is_compiled)
    between = tasks_of(step, TaskKind.BETWEEN)
    made = {key for task in between for key in task.makes}
    assert between and {key.kind for key in made} == {ValueKind.COUPLED}
    forward = tasks_of(step, TaskKind.START, TaskKind.FORWARD)
    assert not made & {key for task in forward for key in task.reads}
    for task in between:
        backward = [t for t in step.tasks[task.group] if t.kind is TaskKind.BACKWARD]
        read = {key for t in backward for key in t.reads}
        assert set(task.makes) <= read


@pytest.mark.parametrize("name", ["moe-tiny", "two-tower-tiny"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.slow
def test_coupled_models_of_the_zoo_are_the_same_in_stages(name, stages):
    assert tasks_of(check(*of_zoo(name), stages, 4), TaskKind.BETWEEN)


def test_what_both_loops_do_is_done_once():
    traced, _ = traced_step("balanced")
    apart = taken_apart(traced, 4)

    def products(jaxpr):
        return sum(e.primitive.name == "dot_general" for e in open_jaxpr(jaxpr).eqns)

    assert len(apart.cut.loops) == 2 and apart.cut.again_flops > 0
    assert products(apart.piece) == products(traced.closed_jaxpr)
    assert not products(apart.once)


def test_a_group_reads_of_others_what_couples_once_a_step():
    step = check(*traced_step("contrastive"), 2, 4)
    assert {(s.key.kind, s.kind, s.source, s.target) for s in step.met} == {
        (ValueKind.SUM, TaskKind.FORWARD, 0, 1)
    }
    ways = [(s.key, s.target) for s in step.sends]
    assert len(ways) == len(set(ways))


def test_two_steps_follow_each_other():
    traced, arrays = traced_step("balanced")
    apart = taken_apart(traced, 4)
    assert apart.early == 2 and len(apart.coupled) == 2
    step = check(traced, arrays, 2, 4)
    count = len(jax.tree.leaves(jax.eval_shape(arguments)[0]))
    first = run_tasks(step, arrays)
    again = run_tasks(step, [*first[:count], *arrays[count:]])
    assert np.isfinite(float(again[count])) and float(again[count]) < float(
        first[count]
    )


def test_rows_that_meet_twice_are_refused_with_a_way_out():
    traced, _ = traced_step("centred")
    with pytest.raises(MicrobatchError, match="in 2 loops at most") as caught:
        taken_apart(traced, 4)
    error = caught.value
    # Ops that couple the batch, and their lines; and what to do about it.
    assert error.where.count("helpers_coupled.py") == 2 == error.where.count(";") + 1
    assert "4 loops, at most 2" in error.numbers
    for text in ("`sub`", "a sum over the batch", "`max`", "a max over the batch"):
        assert text in error.numbers
    assert error.fix.startswith("plan with stages=1; or let the rows meet once")
    assert "per_microbatch='centred'" in error.fix


@pytest.mark.parametrize("name", covering(NAMES, ["weighted", "hardest", "normed"]))
def test_whatever_the_cut_a_group_gets_what_its_tasks_read(name):
    traced, _ = traced_step(name)
    apart = take_apart(traced.closed_jaxpr, traced.program, 4, ())
    ops = len(sides_of(apart).forward)
    for first in range(1, ops):
        stages = (0,) * first + (1,) * (ops - first)
        step = staged(apart, stages, is_split=False)
        read = {(k, t.group) for of in step.tasks for t in of for k in t.reads}
        assert {(send.key, send.target) for send in step.sends} <= read
