"""`plan.why`: what it says of a layout is what a pin of that layout gives."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import PinError, PlanFileError, RhinoError, StageError
from rhino_jax.planner import origin
from rhino_jax.units import parse_seconds
from tests.cases import covering


MESH = {"data": 4, "model": 2}


def step(params: dict[str, Any], x: jax.Array) -> tuple[Any, Any, Any]:
    def loss(p: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("hidden"):
            h = jnp.tanh(x @ p["up"])
        y = h @ p["down"]
        return jnp.mean(y**2), y

    (value, y), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, y


def arguments() -> tuple[Any, Any]:
    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    return {"up": shape(1024, 4096), "down": shape(4096, 1022)}, shape(512, 1024)


@pytest.fixture(scope="module")
def plan() -> rhino.Plan:
    return planned()


def planned(**options: Any) -> rhino.Plan:
    return rhino.plan(
        step,
        *arguments(),
        mesh=MESH,
        hardware="v5e:2x4",
        donate_argnums=0,
        progress=False,
        **{"level": "fast", **options},
    )


@pytest.mark.parametrize(
    ("key", "level"),
    covering(
        [
            ("params['up']", "fast"),
            ("params['up']", "best"),
            ("x", "best"),
            ("out[2]", "best"),
        ]
    ),
)
def test_what_is_said_of_a_layout_is_what_its_pin_gives(
    plan: rhino.Plan, key: str, level: str
) -> None:
    plan = plan if level == "fast" else planned(level=level)
    why = plan.why(key)
    assert why.layouts[0].is_planned
    assert why.layouts[0].step_s == pytest.approx(plan.predicted.step_time_s)
    for layout in why.layouts[1:2]:
        pinned = plan.with_(pins={key: layout.partition_spec})
        fresh = planned(pins={key: layout.partition_spec}, level=level)
        for other in (pinned, fresh):
            gap = max(other.search.gap, 1 - layout.bound_s / layout.step_s, 1e-6)
            assert layout.step_s == pytest.approx(
                other.predicted.step_time_s, rel=2 * gap
            )


def test_values_inside_are_asked_of_by_scope_line_and_number(plan: rhino.Plan) -> None:
    by_scope = plan.why("hidden")
    assert by_scope.type == "bfloat16[512,4096]"
    assert "test_why.py" in by_scope.source
    line = by_scope.source.partition(" (")[0]
    assert plan.why(line).type == by_scope.type
    number = by_scope.name.rpartition(" ")[2]
    assert plan.why(number).spec == by_scope.spec
    assert "recipes have" in str(by_scope)
    assert max(map(len, by_scope.table(full=True).splitlines())) <= 100


def test_one_layout_is_asked_about(plan: rhino.Plan) -> None:
    why = plan.why_not("params['up']", P(("data", "model")))
    assert [x.is_planned for x in why.layouts] == [True, False]
    assert why.layouts[1].partition_spec == P(("data", "model"))


def test_what_does_not_divide_is_said(plan: rhino.Plan) -> None:
    why = plan.why_not("params['down']", P(None, "data"))
    assert why.layouts[1].cannot
    assert "1022 over 4 devices" in " ".join(str(why).split())
    assert any("does not divide dim 1 (1022)" in line for line in why.forces)


def test_pins_are_said() -> None:
    why = planned(pins={"x": P("model")}).why("x")
    assert why.spec == "P('model')"
    assert any(line.startswith("pinned: x") for line in why.forces)


def test_what_means_nothing_is_refused(plan: rhino.Plan) -> None:
    with pytest.raises(PinError, match=r"Did you mean \"params\['up'\]\""):
        plan.why("params['upp']")
    with pytest.raises(PinError, match="replicated in every plan"):
        plan.why("out[1]")


def test_recipes_are_plans(plan: rhino.Plan) -> None:
    for name, predicted in plan.recipes.items():
        if predicted is not None:
            recipe = plan.recipe(name)
            assert recipe.predicted.step_time_s == pytest.approx(predicted.step_time_s)
            assert recipe.search.status == "recipe"
    with pytest.raises(RhinoError, match="Did you mean 'fsdp'"):
        plan.recipe("fsd")


def test_a_recipe_runs(plan: rhino.Plan) -> None:
    recipe = plan.recipe("megatron")
    found = recipe.verify(step, *arguments(), compile_for="cpu")
    assert found.collectives


def test_a_budget_is_planned_for_again(plan: rhino.Plan) -> None:
    budget = int(0.9 * plan.predicted.peak_bytes)
    less = plan.with_(memory_budget_bytes=budget)
    assert less.predicted.peak_bytes <= budget
    assert less.memory_budget_bytes == budget
    assert less.with_(memory_budget_bytes="15GiB").predicted.step_time_s == (
        pytest.approx(plan.predicted.step_time_s, rel=0.01)
    )


def test_another_mesh_is_planned_for(plan: rhino.Plan) -> None:
    other = plan.with_(mesh={"data": 8})
    assert other.mesh_axes == (("data", 8),)
    assert other.why("x").layouts


def test_pins_add_up(plan: rhino.Plan) -> None:
    first = plan.with_(pins={"x": P("data")})
    second = first.with_(pins={"params": {"up": P(None, "model")}})
    assert second.pins == {"x": "P('data')", "params['up']": "P(None, 'model')"}
    third = second.with_(pins={"x": P("model")})
    assert third.pins["x"] == "P('model')"


def test_a_plan_without_its_program_says_so(plan: rhino.Plan, tmp_path: Any) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    asks: list[Callable[[], Any]] = [
        lambda: loaded.with_(pins={"x": P()}),
        lambda: loaded.recipe("dp"),
        lambda: loaded.why("x"),
        lambda: loaded.why_not("x", P()),
    ]
    for ask in asks:
        with pytest.raises(PlanFileError, match="not at hand"):
            ask()


def test_problems_are_solved_again_where_they_are_not_kept(plan: rhino.Plan) -> None:
    before = plan.why_not("x", P("model"))
    plan.origin.solved = None
    assert plan.why_not("x", P("model")).layouts[1].step_s == pytest.approx(
        before.layouts[1].step_s
    )
    plans = [plan.with_(pins={"x": P(*spec)}) for spec in ((), ("data",), ("model",))]
    kept = [p.origin.solved is not None for p in (*plans, plan)]
    assert kept == [False, False, True, True]
    assert sum(kept) == origin.MAX_KEPT


def test_a_plan_of_the_cache_knows_why(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RHINO_CACHE", "1")
    monkeypatch.setenv("RHINO_CACHE_DIR", str(tmp_path))
    first, again = planned(), planned()
    assert not first.cached
    assert again.cached
    assert again.why_not("x", P("model")).planned_s == pytest.approx(
        first.predicted.step_time_s
    )


def test_a_difference_says_what_it_is_worth(plan: rhino.Plan) -> None:
    pinned = plan.with_(pins={"params['up']": P(("data", "model"))})
    found = rhino.diff(pinned, plan)
    worth = {c.path: c.worth_s for c in found.specs}
    assert worth["params['up']"] == pytest.approx(
        pinned.predicted.step_time_s - plan.predicted.step_time_s, abs=1e-6
    )
    assert "worth" in str(found)
    quick = rhino.diff(pinned, plan, worth=False)
    assert all(c.worth_s is None for c in quick.specs)


def test_recipes_of_several_stages_are_refused(plan: rhino.Plan) -> None:
    stage = plan.stages[0]
    staged = dataclasses.replace(plan, stages=(stage, stage))
    with pytest.raises(StageError, match="several stages"):
        staged.recipe("dp")


_CHANGE = re.compile(r"([\d.]+ [mµn]?s) (more|less) of|([\d.]+ [mµn]?s) of collectives")


@pytest.mark.parametrize(
    "key", covering(["x", "params['up']", "params['down']", "hidden"], ["x", "hidden"])
)
def test_what_rises_and_falls_adds_up(plan: rhino.Plan, key: str) -> None:
    sentences = [s for s in plan.why(key).answer if " longer" in s or "as long" in s]
    assert sentences
    for sentence in sentences:
        head, _, reasons = sentence.partition(": ")
        said = re.search(r"([\d.]+ [mµn]?s) \(.*(longer|shorter)", head)
        delta_s = seconds_of(said[1]) if said else 0.0
        total_s = 0.0
        for amount, sign, hidden in _CHANGE.findall(reasons):
            is_less = sign == "less" or (hidden and "no longer" not in reasons)
            total_s += seconds_of(amount or hidden) * (-1 if is_less else 1)
        assert total_s == pytest.approx(delta_s, rel=0.1, abs=1e-7), sentence


def seconds_of(text: str) -> float:
    found = parse_seconds(text.replace("µ", "u"))
    assert found is not None
    return found
