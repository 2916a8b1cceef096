"""Stages that cannot fit are refused before any is planned."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax import models
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.planner.staging import plan as planning
from tests.cases import covering


def train_step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - x) ** 2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def planned(**plan_options):
    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan_options = {"hardware": "h100:8", "donate_argnums": 0, **plan_options}
    return rhino.plan(train_step, params, x, **plan_options)


def test_what_no_cut_changes_is_refused_before_anything_is_planned(monkeypatch):
    def forms_of(*_):
        raise AssertionError("a cut was looked for")

    monkeypatch.setattr(planning, "forms_of", forms_of)
    with pytest.raises(InfeasiblePlanError, match="no 2 stages") as refused:
        planned(stages=2, memory_budget_bytes="4KiB")
    error = refused.value
    # Seven arrays of 16 KiB, and sums of the gradients of six: on 8 devices.
    assert "26.0 KiB on each of its devices" in error.what
    assert "112 KiB of arguments and 96.0 KiB of sums" in error.numbers
    # 26 % of a budget are left free on H100.
    assert "take 71 devices or more" in error.fix and "35979" in error.fix
    assert "params[0]" in error.where


@pytest.mark.slow
def test_the_smallest_peak_is_the_least_of_those_that_are_listed():
    with pytest.raises(InfeasiblePlanError) as refused:
        mesh = {"data": 8}
        planned(memory_budget_bytes="16KiB", stages=1, mesh=mesh, level="fast")
    first, _, listed = refused.value.numbers.partition("smallest peaks: ")
    smallest = re.findall(r"smallest peak found ([0-9.]+) KiB", first)
    peaks = re.findall(r"([0-9.]+) KiB", listed.partition(";")[0])
    assert "micro-batches" in listed and len(peaks) > 2
    assert smallest == [min(peaks, key=float)]


@pytest.mark.parametrize("model", covering(["mlp-tiny", "gpt-tiny", "moe-tiny"]))
def test_stages_that_fit_hold_no_less(model, monkeypatch):
    """What groups hold all the time, all of them together."""
    needed = []

    def check(asked, micro_batches):
        arguments = sum(planning._arguments(asked.of_step.program).values())
        apart = asked.apart(micro_batches)
        sums = [apart.sum_type(k) for k in range(len(apart.leaving))]
        needed.append(arguments + sum(x.size * x.dtype.itemsize for x in sums))

    monkeypatch.setattr(planning, "check_least", check)
    workload = models.get(model)
    plan = rhino.plan(
        workload.step,
        *workload.abstract_args(),
        mesh={"stage": 2, "data": 2},
        hardware="h100",
        microbatches=4,
        # Its auxiliary loss couples the rows of a batch.
        schedule="gpipe" if model == "moe-tiny" else "1f1b",
        level="fast",
        donate_argnums=workload.donate_argnums,
    )
    held = sum(2 * cost.fixed_bytes for cost in plan.pipeline.costs)
    assert 0 < needed[0] <= held
