"""Plans whose stages have values wait in the host's memory, as users run them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from helpers_steps import assert_equal, two_steps

import rhino_jax as rhino
from rhino_jax.hardware.files import load_target
from rhino_jax.models import registry
from rhino_jax.runtime.tasks import controller as running
from tests.runtime.stand_in import normal


WIDTH, ROWS = 128, 4096


def train_step(params, key, x):
    def loss(params):
        h = x
        for i, w in enumerate(params):
            h = jnp.tanh(h @ w)
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, h.shape)
            h = jnp.where(keep, h / 0.9, 0)
        return jnp.mean((h - x) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments(layers=4):
    params = [normal(i, WIDTH, WIDTH) / 11 for i in range(layers)]
    return params, jax.random.key(0), normal(layers, ROWS, WIDTH)


def planned(step, args, share=None, free=None, **plan_options):
    """For TPUs whose hosts are near, on devices of here."""
    sizes = plan_options.pop("sizes")
    options = {
        "mesh": jax.make_mesh(sizes, ("stage", "data")[: len(sizes)]),
        "hardware": load_target("v5e:2x4").replace(
            host_bytes_per_s=1e12, reserve_share=0.0
        ),
        "microbatches": 8,
        "donate_argnums": 0,
        "recompute": "as written" if free is None else "auto",
        **plan_options,
    }
    budget = None if free is None else int(share * free.predicted.peak_bytes)
    return rhino.plan(step, *args, memory_budget_bytes=budget, **options)


@pytest.fixture
def moves(monkeypatch):
    """Kinds of memory that values were moved to."""
    found = []
    as_it_was = running.moved_to

    def moved_to(arrays, shardings):
        moved = as_it_was(arrays, shardings)
        found.extend(x.sharding.memory_kind for x in moved)
        return moved

    monkeypatch.setattr(running, "moved_to", moved_to)
    return found


# In the short run `test_offloaded_by_hand` runs such a plan.
@pytest.mark.slow
def test_two_steps_are_those_of_one_device(moves, tmp_path):
    plan_options = {"sizes": (2,), "schedule": "gpipe"}
    free = planned(train_step, arguments(), **plan_options)
    plan = planned(train_step, arguments(), 0.4, free, **plan_options)
    assert plan.pipeline.is_offloaded
    expected = two_steps(jax.jit(train_step), arguments)
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.pipeline == plan.pipeline
    got = two_steps(plan.jit(train_step, donate_argnums=0), arguments)
    assert_equal(got, expected)
    # Of every step all micro-batches go out and come back, but one or none.
    count = sum(made.offloaded for made in plan.pipeline.remat)
    assert moves.count("pinned_host") == moves.count("device") >= 2 * 7 * count > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "layers", "schedule", "share"),
    [(4, 8, "1f1b", 0.6), (4, 4, "gpipe", 0.5), (2, 8, "interleaved", 0.55)],
)
def test_all_schedules_give_the_same(stages, layers, schedule, share, moves):
    make = partial(arguments, layers)
    plan_options = {"sizes": (stages, 8 // stages), "schedule": schedule}
    free = planned(train_step, make(), **plan_options)
    plan = planned(train_step, make(), share, free, **plan_options)
    assert plan.pipeline.is_offloaded
    got = two_steps(plan.jit(train_step, donate_argnums=0), make)
    assert_equal(got, two_steps(jax.jit(train_step), make))
    assert moves


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "stages", "schedule", "share"),
    [
        ("gpt-tiny-unrolled", {"clip_norm": 0.5}, 4, "gpipe", 0.5),
        ("gpt-tiny", {"remat": False}, 2, "gpipe", 0.5),
        ("t5-tiny", {}, 2, "gpipe", 0.6),
        ("unet-tiny", {}, 4, "gpipe", 0.35),
    ],
)
def test_models_of_the_zoo_give_the_same(name, options, stages, schedule, share, moves):
    workload = registry.get(name, optimizer="sgd", **options)
    donated = workload.donate_argnums
    plan_options = {
        "sizes": (stages, 8 // stages),
        "schedule": schedule,
        "microbatches": 4,
        "donate_argnums": donated,
    }

    def make():
        return workload.make_args(jax.random.key(0))

    free = planned(workload.step, make(), **plan_options)
    plan = planned(workload.step, make(), share, free, **plan_options)
    assert plan.pipeline.is_offloaded
    got = two_steps(plan.jit(workload.step, donate_argnums=donated), make, len(donated))
    assert_equal(got, two_steps(jax.jit(workload.step), make, len(donated)))
    assert moves
