"""What `why` says of a layout, beside a search with that pin from the beginning."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from jax.sharding import PartitionSpec

import rhino_jax as rhino
from rhino_jax.models import registry
from rhino_jax.plan.resolved_pins import resolve_pins


MODELS = (
    "gpt-tiny", "llama-tiny", "moe-tiny", "t5-tiny", "two-tower-tiny", "mlp-tiny",
    "rnn-tiny", "wide-resnet-tiny",
)  # fmt: skip
PAIRS = int(os.environ.get("RHINO_TEST_PAIRS", "2"))
"""Of each model; 25 make 200 of all."""


def planned(name: str) -> rhino.Plan:
    model = registry.get(name)
    return rhino.plan(
        model.step,
        *model.abstract_args(),
        mesh={"data": 4, "model": 2},
        hardware="v5e:2x4",
        donate_argnums=model.donate_argnums,
        microbatches=1,
        recompute="as written",
        progress=False,
    )


def from_the_beginning(plan: rhino.Plan, key: str, spec: Any) -> Any:
    """What a search with the pin finds, recipes and all."""
    search = plan.origin.solved_for(plan).search
    program, axes = search.running.program, plan.mesh_axes
    pins = resolve_pins({key: spec}, program, axes)
    request = replace(
        search.request,
        pins=pins.inputs,
        output_pins=pins.outputs,
        value_pins={**search.request.value_pins, **pins.values},
    )
    return replace(search, request=request).find().solved[0].solution


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_is_said_is_what_a_pin_gives(name: str) -> None:
    plan, rng = planned(name), random.Random(name)
    leaves = [x for x in plan.inputs if x.shape]
    worst, asked_s, whole_s, pairs = 0.0, [], [], 0
    for _ in range(10 * PAIRS):
        leaf = rng.choice(leaves)
        axes: list[Any] = [None] * len(leaf.shape)
        for axis, size in plan.mesh_axes:
            dim = rng.randrange(len(axes) + 1)
            if dim < len(axes) and leaf.shape[dim] % size == 0 and axes[dim] is None:
                axes[dim] = axis
        spec = PartitionSpec(*axes)
        begun = time.monotonic()
        why = plan.why_not(leaf.path, spec)
        asked_s.append(time.monotonic() - begun)
        said = why.layouts[-1]
        if said.is_planned:
            continue
        begun = time.monotonic()
        whole = from_the_beginning(plan, leaf.path, spec)
        whole_s.append(time.monotonic() - begun)
        gap = max(whole.gap, 1 - said.bound_s / said.step_s)
        difference = abs(said.step_s / whole.objective - 1)
        assert difference <= gap + 1e-6, (leaf.path, spec, difference, gap)
        worst, pairs = max(worst, difference), pairs + 1
        if pairs == PAIRS:
            break
    print(
        f"{name}: {pairs} pairs, at most {worst:.2%} apart,"
        f" {sum(asked_s) / len(asked_s):.2f} s each, from the beginning"
        f" {sum(whole_s) / max(1, len(whole_s)):.2f} s"
    )
    assert pairs
