"""What recipes allow of a transformer's inputs, as their papers say it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.analysis.graph import NodeKind
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.models import registry
from rhino_jax.recipes.recipes import recipes_for
from rhino_jax.search.mesh_problem import build_mesh_problem
from rhino_jax.search.records import Request


Axes = frozenset[int]
DATA, MODEL, BOTH = frozenset([0]), frozenset([1]), frozenset([0, 1])


@pytest.fixture(scope="module")
def axes_of_inputs() -> dict[str, dict[str, set[Axes]]]:
    """recipe → "data", "params" or "state" → the axes that may cut one of them."""
    work = registry.get("llama-tiny-unrolled")
    program = trace(work.step, work.abstract_args(), {}).program
    analysis = ProgramAnalysis.of(program, load_target("v5e:4x2"))
    mesh_problem = build_mesh_problem(
        analysis, [("data", 4), ("model", 2)], Request(1e12, {}, {})
    )
    roles, options = analysis.roles, mesh_problem.model.options
    found: dict[str, dict[str, set[Axes]]] = {}
    recipes = recipes_for(mesh_problem.model.mesh)
    assert all(map(mesh_problem.book.allows, recipes))
    left = mesh_problem.book.restrict(recipes, analysis.graph.nodes)
    for row, recipe in enumerate(recipes):
        mine = found[recipe.name] = {"data": set(), "params": set(), "state": set()}
        for node, places in zip(analysis.graph.nodes, left.options, strict=True):
            for what in mine if node.kind is NodeKind.INPUT else ():
                for option in places[row] if node.slot in getattr(roles, what) else ():
                    (spec,) = options[node.id].strategies[option].results
                    mine[what].add(frozenset(a for dim in spec for a in dim))
    return found


@pytest.mark.parametrize("name", ["dp", "zero1", "fsdp"])
def test_data_is_cut_over_all_axes(
    name: str, axes_of_inputs: dict[str, dict[str, set[Axes]]]
) -> None:
    found = axes_of_inputs[name]
    assert found["data"] == {BOTH}
    assert (BOTH in found["params"]) == (name == "fsdp")
    assert (BOTH in found["state"]) == (name != "dp")
    if name != "fsdp":
        assert found["params"] == {frozenset()}
    if name == "dp":
        assert found["state"] == {frozenset()}


@pytest.mark.parametrize("more", ["", "+sp", "+fsdp", "+fsdp+sp"])
def test_megatron_cuts_weights_over_the_last_axis(
    more: str, axes_of_inputs: dict[str, dict[str, set[Axes]]]
) -> None:
    found = axes_of_inputs[f"megatron{more}"]
    assert all(0 in axes for axes in found["data"])
    weights = found["params"] | found["state"]
    assert MODEL in weights or BOTH in weights
    assert any(0 in axes for axes in weights) == ("fsdp" in more)


def test_ops_of_many_results_are_looked_at_beside_those_of_one() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        kept = jax.lax.sort((x @ w, x, 2 * x, 3 * x), num_keys=1)
        return sum(kept, jnp.zeros(())).sum()

    args = jnp.ones((16, 16)), jnp.ones((64, 16))
    mesh = {"data": 4, "model": 2}
    plan = rhino.plan(step, *args, mesh=mesh, hardware="v5e:4x2", progress=False)
    assert plan.recipes["dp"] is not None
