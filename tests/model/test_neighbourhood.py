"""Meshes of many axes: what is searched is near to plans with fewer of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.target import Target
from rhino_jax.model.constants import CONSTANTS
from rhino_jax.model.neighbourhood import Seed, _Full, groupings, taken_together
from rhino_jax.model.strategies import all_specs, count_assignments
from rhino_jax.models import registry
from rhino_jax.planner.search import mesh_problem
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import Request
from tests.cases import covering
from tests.search.brute_force import model_of
from tests.search.zoo import planned


MESH = {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize(
    "name", covering(["mlp-tiny", "gpt-tiny", "moe-tiny", "wide-resnet-tiny"])
)
def test_little_is_lost_and_recipes_are_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = planned(name, MESH, "v5e:4x2")
    monkeypatch.setattr(mesh_problem, "CONSTANTS", replace(CONSTANTS, most_cells=0))
    neighbourhood = planned(name, MESH, "v5e:4x2")
    assert any("only what is near" in note for note in neighbourhood.notes)
    assert not any("only what is near" in note for note in joint.notes)
    assert neighbourhood.predicted.step_time_s <= 1.03 * joint.predicted.step_time_s
    assert neighbourhood.predicted.step_time_s >= joint.search.bound_s
    for recipe, predicted in joint.recipes.items():
        other = neighbourhood.recipes[recipe]
        assert (other is None) == (predicted is None)
        if predicted is not None and other is not None:
            # Their best is near too: they are solved on all but the last axis as one.
            assert other.step_time_s <= 1.05 * predicted.step_time_s
            assert neighbourhood.predicted.step_time_s <= 1.0001 * other.step_time_s


def test_pins_hold_though_seeds_know_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_problem, "CONSTANTS", replace(CONSTANTS, most_cells=0))
    free = planned("mlp-tiny", MESH, "v5e:4x2")
    path = next(leaf.path for leaf in free.inputs if len(leaf.spec) == 2)
    pinned = planned("mlp-tiny", MESH, "v5e:4x2", pins={path: P(("c",), ("b",))})
    assert {leaf.path: leaf.spec for leaf in pinned.inputs}[path] == ((2,), (1,))


@pytest.mark.parametrize("name", covering(["mlp-tiny", "gpt-tiny"]))
def test_what_is_near_compiles_to_what_was_promised(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_problem, "CONSTANTS", replace(CONSTANTS, most_cells=0))
    work = registry.get(name)
    plan = planned(work, MESH, "cpu:8")
    verified = plan.verify(work.step, *work.abstract_args(), compile_for="cpu")
    assert verified.ok, verified.table()


def test_axes_are_taken_together_in_every_way_that_leaves_two() -> None:
    assert groupings(3) == (((0, 1), (2,)), ((0,), (1, 2)))
    assert groupings(4)[0] == ((0, 1, 2), (3,)) and len(groupings(4)) == 3
    target = load_target("v5e:4x4")
    mesh = lay_out(target, (("a", 2), ("b", 2), ("c", 4)))
    joined = taken_together(mesh, ((0, 1), (2,)))
    assert joined.sizes == (4, 4) and joined.names == ("a+b", "c")
    # On the torus they are one side of it.
    assert joined.axes[0].links == lay_out(target, (("x", 4), ("y", 4))).axes[0].links
    assert joined.axes[1] == mesh.axes[2]
    assert joined.over((0, 1)) == mesh.over((0, 1, 2))


def test_stated_links_are_as_fast_as_the_slowest_when_taken_together() -> None:
    target = Target.pure_communication({"a": (1e-6, 3.0), "b": (2e-6, 2.0)})
    joined = taken_together(lay_out(target, (("a", 2), ("b", 4))), ((0, 1),))
    (axis,) = joined.axes
    assert (axis.size, axis.alpha_s, axis.bytes_per_s) == (8, 2e-6, 2.0)


def test_a_seed_says_the_same_in_the_whole_meshs_axes() -> None:
    """Every option of a mesh of two axes is found among those of three that it
    stands for, holding as much."""
    work = registry.get("mlp-tiny")
    target = load_target("v5e:4x2")
    args = work.abstract_args()
    merged = model_of(work.step, args, {"ab": 4, "c": 2}, target)
    whole = model_of(work.step, args, MESH, target)
    found = 0
    for node, options in enumerate(merged.options):
        full = _Full.of(whole.options[node], 3)
        for k in range(len(options.strategies)):
            labels = np.zeros(len(merged.options), dtype=np.int64)
            labels[node] = k
            seed = Seed(merged, labels, ((0, 1), (2,)))
            at = full.find(*seed.strategy(node))
            assert at is not None
            mine, theirs = options.flops[k], whole.options[node].flops[at]
            assert mine == pytest.approx(theirs)
            found += 1
    assert found > 500


@pytest.mark.parametrize("name", covering(["mlp-tiny", "gpt-tiny", "moe-tiny"]))
def test_options_near_to_seeds_are_those_of_all_options(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are listed without the others, which may be thousands."""
    work, target = registry.get(name), load_target("v5e:4x2")
    analysis = ProgramAnalysis.of(
        trace(work.step, work.abstract_args(), {}).program, target
    )
    request = Request(memory_budget_bytes=2**40, pins={}, output_pins={}, level="fast")
    monkeypatch.setattr(mesh_problem, "CONSTANTS", replace(CONSTANTS, most_cells=0))
    listed = build_mesh_problem(analysis, tuple(MESH.items()), request).model
    assert listed.builder.centres
    monkeypatch.setattr(mesh_problem, "least_cells", lambda builder: 0)
    filtered = build_mesh_problem(analysis, tuple(MESH.items()), request).model
    assert not filtered.builder.centres
    for mine, other in zip(listed.options, filtered.options, strict=True):
        assert mine.strategies == other.strategies
        np.testing.assert_array_equal(mine.cost_s, other.cost_s)


@pytest.mark.parametrize(
    ("shape", "sizes"), [((2,) * 5, (2, 2, 2)), ((12, 8, 1, 3), (2, 3, 4)), ((), (2,))]
)
def test_cuts_are_counted_as_they_are_listed(
    shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    cuttable = tuple(i for i, n in enumerate(shape) if n > 1)
    assert count_assignments(shape, cuttable, sizes) == len(all_specs(shape, sizes))
