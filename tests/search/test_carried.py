"""What was chosen for one program, in another that is nearly the same."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from rhino_jax import models
from rhino_jax.bench.planning import trace_workload
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.hardware.files import load_target
from rhino_jax.planner.search.driver import find
from rhino_jax.planner.search.found import carried
from rhino_jax.planner.search.records import Request
from tests.cases import covering


AXES = (("x", 2), ("y", 2))
LINE = (("x", 4),)
TARGET = load_target("h100:8")
REQUEST = Request(math.inf, {}, {}, level="fast", has_recipes=False)


@cache
def program(name, **options):
    return trace_workload(models.get(name, **options)).program


@cache
def found_on(axes, name, **options):
    """Return what the search finds for a workload on one mesh."""
    return find(program(name, **options), [axes], TARGET, REQUEST)


@pytest.mark.parametrize("name", covering(["gpt-tiny", "moe-tiny", "unet-tiny"]))
def test_the_same_program_does_the_same(name):
    (solved,) = found_on(AXES, name).solved
    again = carried(solved, solved.mesh_problem)
    assert again is not None
    options = solved.mesh_problem.model.options
    # Two options may do the same to all that is read and made.
    assert all(
        mine.strategies[a] == mine.strategies[b]
        for mine, a, b in zip(options, again, solved.solution.labels, strict=True)
    )


@pytest.mark.parametrize("name", covering(["gpt-tiny", "gpt-tiny-unrolled", "t5-tiny"]))
def test_another_batch_is_searched_from_there(name):
    before = found_on(AXES, name)
    other = program(name, batch=64)
    free = found_on(AXES, name, batch=64)
    like = find(other, [AXES], TARGET, REQUEST, like=before)
    assert like.step_s <= 1.02 * free.step_s
    labels = like.solved[0].solution.labels
    assert like.step_s == pytest.approx(
        like.solved[0].mesh_problem.overlap.step_s(labels)
    )


def test_on_another_mesh_it_is_searched_as_ever():
    before, free = found_on(LINE, "gpt-tiny"), found_on(AXES, "gpt-tiny")
    like = find(program("gpt-tiny"), [AXES], TARGET, REQUEST, like=before)
    assert like.step_s == free.step_s
    assert np.array_equal(
        like.solved[0].solution.labels, free.solved[0].solution.labels
    )


def test_of_an_estimate_the_best_mesh_is_not_searched_again():
    meshes = [LINE, AXES]
    seen = []
    request = replace(REQUEST, watch=lambda done, _: seen.append(done.name))
    free = find(program("gpt-tiny"), meshes, TARGET, request)
    more = seen.count("solve")
    seen.clear()
    found = find(program("gpt-tiny"), meshes, TARGET, request, is_estimate=True)
    assert more == seen.count("solve") + 1
    assert found.meshes == free.meshes
    assert free.step_s <= found.step_s <= 1.02 * free.step_s


def test_pins_that_no_user_wrote_are_not_named_where_nothing_fits():
    of = program("mlp-tiny")
    whole = ((),) * of.values[of.inputs[0].value].rank
    small = replace(REQUEST, memory_budget_bytes=1.0, pins={0: whole})
    for names_pins in (True, False):
        request = replace(small, names_pins=names_pins)
        with pytest.raises(InfeasiblePlanError) as refused:
            find(of, [AXES], TARGET, request).plan()
        assert ("pin " in str(refused.value)) == names_pins
