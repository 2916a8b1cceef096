"""Layers under `jax.checkpoint`, whose backward pass is one equation, in stages."""

from __future__ import annotations

import pytest

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from rhino_jax.models import registry
from rhino_jax.transform.staged.apart import take_apart
from rhino_jax.transform.staged.labels import Labels
from rhino_jax.transform.staged.sides import sides_of


@pytest.mark.parametrize("stages", [2, 4])
def test_backward_passes_are_where_the_cut_has_them(stages):
    """Keys of a decoder's cross attention need the encoder alone: they could be made
    stages ahead of the layer that they are of."""
    workload = registry.get("t5-tiny", remat=True, num_layers=4, optimizer="sgd")
    args = workload.abstract_args()
    plan = rhino.plan(
        workload.step,
        *args,
        mesh={"stage": stages},
        hardware=f"h100:{stages}",
        microbatches=4,
        schedule="1f1b",
    )
    traced = trace(workload.step, args, {})
    sides = sides_of(take_apart(traced.closed_jaxpr, traced.program, 4, ()))
    stage_of = plan.pipeline.stage_of
    labels = Labels.at(sides, stage_of, tuple(range(stages)))
    place = {op: k for k, op in enumerate(sides.forward)}
    assert any(sides.not_before)
    ops = (sides.program.ops[i] for i in sides.program.body.ops)
    layers = [i for i, op in enumerate(ops) if op.name == "remat2"]
    assert len(layers) >= 8
    for op in layers:
        assert labels.chunk(labels.of[op]) == stage_of[place[sides.homes[op]]]
