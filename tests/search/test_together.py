"""Programs that share state: the joint optimum, by enumeration of all choices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.analysis.graph import NodeKind
from rhino_jax.errors import InfeasiblePlanError, PinError, RhinoError
from rhino_jax.planner.search.read_back.extract import overlap_of
from tests.cases import covering
from tests.search.brute_force import model_of, objectives, peaks


F = jax.ShapeDtypeStruct
MESH = {"x": 2, "y": 2}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return F(shape, jnp.float32)


def rows(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def turned(w: Any, y: Any) -> Any:
    return jnp.einsum("ij,kj->ik", y, w)


def steps_s(model: Any) -> np.ndarray:
    """The predicted step under every choice, an axis per node."""
    overlap = overlap_of(model)
    total = objectives(overlap.problem.costs, overlap.problem.edges)
    if overlap.hides_nothing:
        return total
    hidden = objectives(overlap.hidable.costs, overlap.hidable.edges)
    compute = objectives(overlap.compute.costs, overlap.compute.edges)
    return total - np.minimum(hidden, overlap.share * compute)


def best_by_spec(model: Any, slot: int, budget: float = math.inf) -> dict[Any, float]:
    """The best step for every spec of an input."""
    (node,) = [
        n for n in model.graph.nodes if n.kind is NodeKind.INPUT and n.slot == slot
    ]
    every = steps_s(model)
    if not math.isinf(budget):
        every[peaks(model.problem) > budget] = math.inf
    others = tuple(k for k in range(every.ndim) if k != node.id)
    best = every.min(axis=others)
    specs = [s.results[0] for s in model.options[node.id].strategies]
    return dict(zip(specs, best.tolist(), strict=True))


def best_sum(models: Sequence[Any], weights: Sequence[float]) -> float:
    """The least weighted sum of steps with one spec of the first inputs."""
    every = [best_by_spec(model, 0) for model in models]
    return min(
        sum(w * best[spec] for w, best in zip(weights, every, strict=True))
        for spec in every[0]
    )


SLOW_LINKS = rhino.Target.pure_communication({"x": (1e-6, 1e9), "y": (1e-6, 4e8)})
TARGETS = [SLOW_LINKS, rhino.load_target("cpu"), rhino.load_target("v5e")]
WEIGHTS = [(1.0, 1.0), (10.0, 1.0), (1.0, 10.0), (0.3, 0.1)]


def is_short(case: Any) -> bool:
    """Return whether a case has the first target, or the second weights."""
    target, weights = case
    return target is SLOW_LINKS or weights == WEIGHTS[1]


@pytest.mark.parametrize(
    ("target", "weights"),
    covering(itertools.product(TARGETS, WEIGHTS), is_short),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_weighted_sum_is_least_of_all(target: Any, weights: Any) -> None:
    first, second = (f32(64, 32), f32(8, 64)), (f32(64, 32), f32(128, 32))
    found = rhino.plan_together(
        {"rows": (rows, first), "turned": (turned, second)},
        weights=dict(zip(("rows", "turned"), weights, strict=True)),
        mesh=MESH,
        hardware=target,
        progress=False,
    )
    models = [
        model_of(rows, first, MESH, target),
        model_of(turned, second, MESH, target),
    ]
    want = best_sum(models, weights)
    assert found.objective_s == pytest.approx(want, rel=1e-6, abs=1e-12)
    assert found.bound_s <= want * (1 + 1e-6)
    assert found["rows"].in_specs[0] == found["turned"].in_specs[0]


def test_weights_decide_who_gets_its_own_layout() -> None:
    # One wants the weight's rows whole, the other its columns.
    programs = {
        "rows": (rows, (f32(256, 256), f32(2, 256))),
        "turned": (turned, (f32(256, 256), f32(2, 256))),
    }
    pins = {"rows": {"out": P(None, "x")}, "turned": {"out": P(None, "x")}}

    def spec(weight: float) -> Any:
        found = rhino.plan_together(
            programs,
            weights={"rows": weight},
            mesh={"x": 2},
            hardware=SLOW_LINKS,
            pins=pins,
            memory_budget_bytes=200_000,  # the weight has 262,144
            progress=False,
        )
        return found["rows"].in_specs[0]

    assert spec(1000.0) == P(None, "x")
    assert spec(0.001) == P("x")


def train(params: Any, moments: Any, x: Any) -> Any:
    grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - m, params, moments), moments


def evaluate(params: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ params["w"]))


STATE = {"w": f32(256, 256)}
TRAIN = (jax.jit(train, donate_argnums=(0, 1)), (STATE, STATE, f32(64, 256)))
EVALUATE = (evaluate, (STATE, f32(64, 256)))


def test_what_the_others_need_is_held_and_counts() -> None:
    programs = {"train": TRAIN, "eval": EVALUATE}
    found = rhino.plan_together(programs, mesh=MESH, hardware="cpu", progress=False)
    moments = found["train"].inputs[1]
    assert moments.path == "moments['w']"
    # Batches go; parameters are the evaluation's own.
    assert found.held_bytes == {"train": 0, "eval": moments.bytes_per_device}
    assert found.peak_bytes == max(
        found["train"].predicted.peak_bytes,
        found["eval"].predicted.peak_bytes + moments.bytes_per_device,
    )
    assert found["eval"].memory_budget_bytes < found["train"].memory_budget_bytes


def test_a_budget_holds_for_all_together() -> None:
    def other(v: Any, y: Any) -> Any:
        return jnp.tanh(y @ v)

    programs = {
        "rows": (rows, (f32(256, 256), f32(2, 256))),
        "other": (other, (f32(256, 256), f32(2, 256))),
    }
    options = {"mesh": {"x": 2}, "hardware": SLOW_LINKS, "progress": False}
    free = rhino.plan_together(programs, **options)
    assert free.shared == ()
    # Each fits by itself with its weights whole, but not while the other's stay.
    weight = 256 * 256 * 4
    budget = weight + weight // 2 + 20_000
    assert free.peak_bytes > budget > free["rows"].predicted.peak_bytes
    tight = rhino.plan_together(programs, memory_budget_bytes=budget, **options)
    assert tight.peak_bytes <= budget
    assert tight.objective_s >= free.objective_s
    with pytest.raises(InfeasiblePlanError, match="no layout of the shared state"):
        rhino.plan_together(programs, memory_budget_bytes=weight, **options)


def test_a_pin_of_one_program_holds_in_all() -> None:
    programs = {"train": TRAIN, "eval": EVALUATE}
    pins = {"train": {"params['w']": P("x", "y")}}
    options = {"mesh": MESH, "hardware": "cpu", "progress": False}
    found = rhino.plan_together(programs, pins=pins, **options)
    assert found["eval"].in_specs[0] == {"w": P("x", "y")}
    pins["eval"] = {"params['w']": P()}
    with pytest.raises(PinError, match="pin a shared array differently") as error:
        rhino.plan_together(programs, pins=pins, **options)
    assert "train: params['w']" in error.value.where


def test_without_a_mesh_one_is_chosen_for_all() -> None:
    found = rhino.plan_together({"train": TRAIN, "eval": EVALUATE}, progress=False)
    assert found["train"].mesh is found["eval"].mesh is found.mesh
    assert math.prod(size for _, size in found.mesh_axes) == jax.device_count()
    text = repr(found)
    assert "1 × train" in text and "allocated for the others" in text


def test_draft_and_target_share_tokens_and_the_mesh() -> None:
    def draft(draft_params: Any, tokens: Any) -> Any:
        return draft_params["embed"][tokens] @ draft_params["out"]

    def target(params: Any, tokens: Any) -> Any:
        hidden = jnp.tanh(params["embed"][tokens] @ params["w"])
        return jnp.argmax(hidden @ params["out"], -1)

    tokens = F((8, 16), jnp.int32)
    small = {"embed": f32(64, 32), "out": f32(32, 64)}
    large = {"embed": f32(64, 128), "w": f32(128, 128), "out": f32(128, 64)}
    programs = {"draft": (draft, (small, tokens)), "target": (target, (large, tokens))}
    found = rhino.plan_together(programs, weights={"draft": 4}, progress=False)
    assert found.shared == ((("draft", "tokens"), ("target", "tokens")),)
    assert found["draft"].in_specs[1] == found["target"].in_specs[1]
    assert found["draft"].mesh is found["target"].mesh
    # Both models stay while the other runs.
    stays = {n: sum(x.bytes_per_device for x in found[n].inputs[:-1]) for n in found}
    assert found.held_bytes == {"draft": stays["target"], "target": stays["draft"]}


def test_each_plan_runs_verifies_and_is_saved(tmp_path: Any) -> None:
    found = rhino.plan_together(
        {"train": TRAIN, "eval": EVALUATE}, mesh=MESH, progress=False
    )
    params, moments = found["train"].init(
        lambda key: ({"w": jax.random.normal(key, (256, 256))},) * 2, jax.random.key(0)
    )
    x = jnp.ones((64, 256))
    run = found["eval"].jit(evaluate)
    want = evaluate(jax.device_get(params), x)
    np.testing.assert_allclose(run(params, x), want, rtol=1e-3)
    (bound,) = run._bounds.values()
    placed = run._match(bound, (params, found["eval"].put((params, x))[1]), {})
    assert placed is not None and not placed.to_move
    found["train"].jit(train, donate_argnums=(0, 1))(params, moments, x)
    assert found["eval"].verify(evaluate, STATE, f32(64, 256)).compiled.peak_bytes > 0
    found["eval"].save(tmp_path / "eval.json")
    assert rhino.load_plan(tmp_path / "eval.json").in_specs == found["eval"].in_specs


def test_odd_arguments_are_refused() -> None:
    for programs, match in (
        ([TRAIN], "mapping of names"),
        ({}, "mapping of names"),
        ({"a": train}, "is \\(function, args\\)"),
        ({"a": (train, STATE)}, "is \\(function, args\\)"),
    ):
        with pytest.raises(RhinoError, match=match):
            rhino.plan_together(programs)
    for weights, match in (
        ({"evaluate": 1}, "names no program: 'evaluate'.*'eval'"),
        ({"eval": 0}, "positive number"),
        ({"eval": True}, "positive number"),
        ([1, 2], "names no program"),
    ):
        with pytest.raises(RhinoError, match=match):
            rhino.plan_together({"eval": EVALUATE}, weights=weights)
