"""Stages that gain nothing are refused by what a micro-batch takes on one group."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.decision import Decision, NotFaster
from rhino_jax.planner.searched import climb
from rhino_jax.planner.staging import plan as planning
from rhino_jax.planner.staging.cuts import cuts_of
from rhino_jax.planner.staging.shapes import (
    MAX_AXIS_GAIN,
    GroupMeshes,
    StepBound,
    SubmeshSearches,
)
from rhino_jax.planner.variant_search import NEAR


def shapes(compute_s: float, sent_s: float, groups: int = 4) -> GroupMeshes:
    """Equal groups on each of which a micro-batch takes so long."""
    return GroupMeshes(
        (("stage", groups), ("x", 2)),
        (1,) * groups,
        {1: {0: compute_s, 1: sent_s}},
        (1e9, 1e-6),
        compute_s={1: compute_s},
    )


@pytest.mark.parametrize(
    ("count", "seconds"),
    [
        (16, 16 * 5 / 4 * (1 + 3 / 48)),  # as searched
        (8, 16 * 4.5 / 4 * (1 + 3 / 24)),  # half as many gathers of weights
        (32, 16 * 5 / 4 * (1 + 3 / 96)),  # no fewer, but less idle
        (2, 16 * 4.125 / 4),  # slices may fill the pipeline
    ],
)
def test_a_step_is_bounded_by_what_groups_do_together(count, seconds):
    bound_s = shapes(4.0, 1.0).least_step_s(16, count)
    assert bound_s == pytest.approx((1 - NEAR) * seconds)


def test_unequal_groups_share_the_model_by_their_speed():
    one = shapes(4.0, 0.0, groups=1)
    of = GroupMeshes(
        (("stage", 3), ("x", 2)),
        (2, 1),
        {2: {0: 2.0}, 1: {0: 4.0}},
        (1e9, 1e-6),
        compute_s={2: 2.0, 1: 4.0},
    )
    whole = one.least_step_s(8, 8)
    assert of.least_step_s(8, 8) == pytest.approx(whole / 3 * (1 + 1 / 24))


def test_what_cannot_be_enough_says_what_it_takes_at_least():
    counts = [16, 8, 64]
    with pytest.raises(NotFaster) as slower:
        StepBound(counts, 10.0).check(shapes(4.0, 1.0))
    least = min(shapes(4.0, 1.0).least_step_s(16, n) for n in counts)
    assert slower.value.step_s == least
    StepBound(counts, least + 1e-9).check(shapes(4.0, 1.0))
    StepBound(counts, math.inf).check(shapes(4.0, 1.0))


def test_a_micro_batch_on_more_axes_has_to_beat_a_bound():
    bound = StepBound([16, 8, 64], 10.0)
    # Meshes of more axes may send less: only compute counts.
    most_s = bound.most_s(shapes(1.0, 1.0))
    bound.check(shapes(1.0, most_s - 1.0 - 1e-9))
    with pytest.raises(NotFaster):
        bound.check(shapes(1.0, most_s - 1.0 + 1e-9))
    for compute_s, sent_s in ((4.0, 0.0), (1.0, most_s / (1 - MAX_AXIS_GAIN))):
        with pytest.raises(NotFaster):
            bound.most_s(shapes(compute_s, sent_s))


def test_numbers_of_stages_whose_bounds_hardly_fall_are_not_followed():
    tried: list[int] = []

    def plan_in(places: tuple[int, ...], enough_s: float) -> PlanData:
        tried.append(len(places))
        raise NotFaster(2.0 - 0.001 * len(places))

    sizes = Decision(partial(plan_in, enough_s=1.0), ())
    climb(sizes, [2, 4, 8, 16, 32, 64, 128])
    assert tried == [8, 16, 4]


def test_a_cut_that_cannot_be_enough_searches_no_mesh(monkeypatch):
    """Its compute alone refuses it."""
    asked = []

    def ask(*args):
        asked.append(args)
        raise NotFaster(math.inf)

    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) @ w))(w)
        return loss, w - gradient

    monkeypatch.setattr(planning, "cuts_of", ask)
    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (256, 64)))
    options = {"stages": 2, "microbatches": 4, "hardware": "v5e:2x4"}
    with pytest.raises(NotFaster):
        rhino.plan(step, *shapes, progress=False, **options)
    request, meshes, count = asked[0]
    assert len(meshes) > 1
    for enough_s in (1e-9, math.inf):
        finds = SubmeshSearches()
        search = replace(request.search, enough_s=enough_s)
        again = replace(request, finds=finds, search=search)
        if math.isinf(enough_s):
            cuts_of(again, meshes, count)
        else:
            with pytest.raises(NotFaster):
                cuts_of(again, meshes, count)
        assert bool(finds.whole) == math.isinf(enough_s)
