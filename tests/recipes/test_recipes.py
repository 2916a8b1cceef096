"""What recipes allow of a transformer's inputs, as their papers say it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.analysis.graph import NodeKind
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.models import registry
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import Request
from rhino_jax.recipes.recipes import recipes_for


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
    recipes = [r for r in recipes_for(mesh_problem.model.mesh) if not r.experts]
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


def loss(params: jax.Array, x: jax.Array) -> jax.Array:
    """Of layers in a loop."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    x = jax.lax.scan(layer, x, params.astype(jnp.bfloat16))[0]
    return (x.astype(jnp.float32) ** 2).mean()


def of_rows(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, 512 * i, 512)


def of_one(x: jax.Array, i: jax.Array) -> jax.Array:
    return x.reshape(4, 512, -1)[i]


def of_split(x: jax.Array, i: jax.Array) -> jax.Array:
    return x[i]


@pytest.mark.parametrize("take", [of_rows, of_one, of_split, None])
def test_fsdp_gathers_weights_in_the_loops_that_use_them(take: Any) -> None:
    def step(params: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Accumulates the gradients of four micro-batches."""

        def add(carry: Any, x: jax.Array) -> tuple[Any, None]:
            x = x if take is None else take(rows, x)
            found = jax.value_and_grad(loss)(params, x)
            return jax.tree.map(jnp.add, carry, found), None

        pieces = rows.reshape(4, 512, 2048) if take is None else jnp.arange(4)
        start = jnp.zeros(()), jnp.zeros_like(params)
        total, gradient = jax.lax.scan(add, start, pieces)[0]
        return params - 0.01 * gradient, total

    shape = jax.ShapeDtypeStruct
    args = (
        shape((6, 2048, 2048), jnp.float32),
        shape((4, 512, 2048) if take is of_split else (2048, 2048), jnp.bfloat16),
    )
    plan = rhino.plan(step, *args, mesh={"x": 8}, hardware="h100:8", microbatches=1)
    fsdp = plan.recipe("fsdp")
    # One layer at a time, forward and backward, of each of four micro-batches; of
    # activations nothing is sent, and rows are no more than they are.
    gathers = [c for c in fsdp.collectives if c.kind == "all-gather"]
    assert sum(c.count for c in gathers if c.bytes >= 8 * 2048 * 2048) == 2 * 4 * 6
    assert sum(c.count for c in gathers) <= 2 * 4 * 6 + 4
    assert fsdp.predicted.peak_bytes < plan.recipe("zero1").predicted.peak_bytes


def test_frozen_weights_are_no_data() -> None:
    """As of a teacher, a reference model, or the base of adapters: the batch leads with
    none of their dims."""

    def logits(w: Any, tokens: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w["in"] + w["bias"]) @ w["out"], None

        x, _ = jax.lax.scan(layer, w["embedding"][tokens], w["layers"])
        return x @ w["embedding"].T

    def step(w: Any, teacher: Any, tokens: jax.Array, weight: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            off = (logits(w, tokens) - logits(teacher, tokens)) ** 2
            return (off.mean(-1) * weight).mean()

        return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))

    sizes = dict(embedding=(64, 32))
    layers = {"in": (3, 32, 48), "bias": (3, 48), "out": (3, 48, 32)}
    w: Any = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in sizes.items()}
    w["layers"] = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in layers.items()}
    rows = [jax.ShapeDtypeStruct((16,), d) for d in (jnp.int32, jnp.float32)]
    program = trace(step, (w, w, *rows), {}).program

    roles = ProgramAnalysis.of(program, load_target("v5e:4x2")).roles

    assert {program.inputs[i].path for i in roles.data} == {"tokens", "weight"}
    assert len(roles.batch) == 1 and len(roles.params) == 8
