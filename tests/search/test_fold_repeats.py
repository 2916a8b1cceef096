"""Folded problems cost what they stand for, and lose nothing on repeated layers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rhino_jax.hardware.files import load_target
from rhino_jax.models import registry
from rhino_jax.recipes.recipe_book import RecipeBook
from rhino_jax.search.folding import fold
from rhino_jax.search.folding.symmetry import find_symmetry, marks_of
from rhino_jax.search.limits import LIMITS
from rhino_jax.search.read_back.extract import overlap_of
from rhino_jax.search.read_back.traffic import ChoiceTraffic
from tests.search.brute_force import model_of
from tests.search.zoo import WITHOUT_TILES, planned


MESH = {"data": 4, "model": 4}
UNROLLED = {
    "gpt-tiny-unrolled": {"num_layers": 4},
    "llama-tiny-unrolled": {"num_layers": 4},
    "moe-tiny": {"num_layers": 4, "layers": "unroll"},
    "t5-tiny": {"layers": "unroll"},
    "wide-resnet-tiny": {"blocks": (4, 4)},
}


def whole_and_symmetry(name, **overrides):
    """The whole problem and its folding."""
    work = registry.get(name, **overrides)
    target = load_target("v5e:4x4")
    model = model_of(work.step, work.abstract_args(), MESH, target, 2**34)
    overlap = overlap_of(model)
    return overlap, find_symmetry(overlap, marks_of(RecipeBook.of(model)))


@pytest.mark.parametrize("name", UNROLLED)
def test_a_folded_choice_costs_and_holds_what_its_expansion_does(name: str) -> None:
    whole, symmetry = whole_and_symmetry(name, **UNROLLED[name])
    folded = symmetry.overlap(whole)
    assert len(symmetry.first) < 0.8 * len(symmetry.orbits)
    rng = np.random.default_rng(0)
    for _ in range(5):
        labels = np.array([rng.integers(len(c)) for c in folded.problem.costs])
        every = symmetry.expand(labels)
        assert (symmetry.contract(every) == labels).all()
        assert folded.step_s(labels) == pytest.approx(whole.step_s(every), rel=1e-9)
        assert folded.hidden_s(labels) == pytest.approx(whole.hidden_s(every), rel=1e-9)
        assert folded.is_exposed(labels) == whole.is_exposed(every)
        np.testing.assert_allclose(
            folded.problem.profile(labels), whole.problem.profile(every), rtol=1e-9
        )


@pytest.mark.parametrize("name", ["gpt-tiny-unrolled", "wide-resnet-tiny"])
def test_a_folded_choice_sends_what_its_expansion_does(name: str) -> None:
    work = registry.get(name, **UNROLLED[name])
    target = load_target("v5e:4x4")
    model = model_of(work.step, work.abstract_args(), MESH, target, 2**34)
    overlap = overlap_of(model)
    symmetry = find_symmetry(overlap, marks_of(RecipeBook.of(model)))
    every, one = ChoiceTraffic.of(model), ChoiceTraffic.folded(model, symmetry)
    assert len(one.sites) < 0.8 * len(every.sites)
    rng = np.random.default_rng(0)
    for _ in range(5):
        labels = np.array(
            [rng.integers(len(model.options[n].cost_s)) for n in symmetry.first]
        )
        whole = symmetry.expand(labels)
        sent = every.collectives(whole)
        assert len(sent) > 10
        assert every.seconds(whole) == pytest.approx(sum(c.seconds for c in sent))
        assert one.seconds(labels) == pytest.approx(every.seconds(whole), rel=1e-9)
        assert one.flops(labels) == pytest.approx(every.flops(whole), rel=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name in ("moe-tiny", "t5-tiny")
        else name
        for name in UNROLLED
    ],
)
def test_the_folded_optimum_is_the_plain_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To what both searches leave open, and no better than the plain bound."""
    work = registry.get(name, **UNROLLED[name])
    found = {}
    for kind, unfolded_s in (("folded", 0.0), ("plain", math.inf)):
        monkeypatch.setattr(fold, "LIMITS", replace(LIMITS, unfolded_s=unfolded_s))
        found[kind] = planned(work, MESH, WITHOUT_TILES).search
    folded, plain = found["folded"], found["plain"]
    assert folded.objective_s == pytest.approx(plain.objective_s, rel=2e-3)
    assert folded.objective_s >= plain.bound_s
    assert folded.gap <= 0.01 and plain.gap <= 0.01


@pytest.mark.parametrize(
    ("name", "few", "many"),
    [("gpt-tiny-unrolled", 6, 12), ("moe-tiny", 8, 16)],
)
def test_orbits_do_not_grow_in_number_with_depth(
    name: str, few: int, many: int
) -> None:
    """Every second layer of the MoE has experts: those fold with each other."""
    sizes = [
        whole_and_symmetry(name, num_layers=depth, layers="unroll")[1]
        for depth in (few, many)
    ]
    assert len(sizes[1].orbits) > 1.8 * len(sizes[0].orbits)
    assert len(sizes[1].first) == len(sizes[0].first)


def test_programs_that_are_searched_in_a_second_are_left_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, target = registry.get("mlp-tiny", depth=8), load_target("v5e:4x4")
    model = model_of(work.step, work.abstract_args(), MESH, target, 2**34)
    assert fold.fold(model, "all").symmetry.is_identity
    monkeypatch.setattr(fold, "LIMITS", replace(LIMITS, unfolded_s=0.0))
    assert not fold.fold(model, "all").symmetry.is_identity


def test_a_pin_holds_for_one_layer_of_many() -> None:
    work = registry.get("gpt-tiny-unrolled", num_layers=12)
    free = {leaf.path: leaf.spec for leaf in planned(work, MESH, "v5e:4x4").inputs}
    path = next(p for p in free if "[5]" in p and len(free[p]) == 2)
    pins = {path: P("model", "data")}
    pinned = planned(work, MESH, "v5e:4x4", pins=pins)
    specs = {leaf.path: leaf.spec for leaf in pinned.inputs}
    assert specs[path] == ((1,), (0,))
    others = [p for p in specs if p == path.replace("[5]", "[8]")]
    assert others and all(specs[p] == free[p] for p in others)


def test_nodes_of_an_orbit_see_equal_surroundings() -> None:
    """Each orbit of a chain a - b - a - b has neighbours of one kind."""
    whole, symmetry = whole_and_symmetry("gpt-tiny-unrolled", num_layers=6)
    around: dict[int, Counter] = {}
    for edge in whole.problem.edges:
        for here, there in ((edge.source, edge.target), (edge.target, edge.source)):
            around.setdefault(here, Counter())[id(edge.table), here < there] += 1
    kinds: dict[int, set] = {}
    for node, tables in around.items():
        kinds.setdefault(int(symmetry.orbits[node]), set()).add(
            frozenset(tables.items())
        )
    assert all(len(k) == 1 for k in kinds.values())
