"""`plan.why` of plans in stages: where a value is, and what a pin of it gives there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import PinError, PlanFileError
from rhino_jax.explain.questions import moved as pinned_elsewhere
from rhino_jax.explain.why import Why
from rhino_jax.models import registry
from rhino_jax.units import format_seconds
from tests.cases import covering


MESH = {"stage": 2, "data": 2, "model": 2}
WIDTH, ROWS = 256, 64


def step(params: dict[str, Any], x: jax.Array) -> Any:
    """Layers between two readings of one weight."""

    def loss(p: dict[str, Any]) -> jax.Array:
        h = x @ p["tied"]
        for w in p["layers"]:
            h = jnp.tanh(h @ w)
        return jnp.mean((h @ p["tied"].T - x) ** 2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def arguments() -> tuple[Any, Any]:
    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers = [f32(WIDTH, WIDTH)] * 4
    return {"tied": f32(2 * WIDTH, WIDTH), "layers": layers}, f32(ROWS, 2 * WIDTH)


OPTIONS = {
    "mesh": MESH,
    "hardware": "v5e:2x4",
    "donate_argnums": 0,
    "microbatches": 4,
    "schedule": "1f1b",
    "progress": False,
}


def planned(pins: Any = None, level: str = "fast", **options: Any) -> rhino.Plan:
    options = {**OPTIONS, "pins": pins, "level": level, **options}
    return rhino.plan(step, *arguments(), **options)


@pytest.fixture(scope="module")
def plan() -> rhino.Plan:
    return planned()


def words(why: Why) -> str:
    return " ".join(str(why).split())


def works(plan: rhino.Plan) -> list[float]:
    return [stage.predicted.step_time_s for stage in plan.stages]


def test_it_is_said_where_a_value_is_and_why(plan: rhino.Plan) -> None:
    stage = plan.inputs[0].stage
    why = plan.why_not("params['layers'][0]", P("model"))
    assert (why.stage, why.also) == (stage, ())
    assert why.stage_s == pytest.approx(works(plan)[stage])
    assert why.planned_s == pytest.approx(plan.predicted.step_time_s)
    text = words(why)
    assert f"params['layers'][0] is on stage {stage} of 2, where test_why_in_st" in text
    assert "the stages divide where stage 0 sends stage 1 the float32[16,256]" in text
    assert "this one was estimated to be the fastest" in text
    assert "stage 1 gets float32[16,256] of this one as" in text
    assert max(map(len, why.table(full=True).splitlines())) <= 100
    assert "on stage 0" in why._repr_html_()


def groups(plan: rhino.Plan) -> Any:
    return plan.origin.solved_for(plan).groups


def handed(plan: rhino.Plan) -> list[Any]:
    """How groups lay out what they hand one another."""
    sends = plan.origin.solved_for(plan).step.sends
    return [groups(plan)[send.source].specs[send.key] for send in sends]


def gap(*plans: rhino.Plan) -> float:
    found = [g.found.solved[0].solution.gap for p in plans for g in groups(p)]
    return 2 * max(found) + 1e-6


def agrees(plan: rhino.Plan, key: str, spec: Any, fresh: rhino.Plan) -> bool:
    """Whether what is said of a layout is what planning with that pin from the
    beginning finds, up to the gaps that the searches leave open; where groups then hand
    one another anything in another layout it may be slower."""
    why, pinned = plan.why_not(key, spec), plan.with_(pins={key: spec})
    most = gap(pinned, fresh)
    for part in (why, *why.also):
        said = part.layouts[-1]
        assert said.partition_spec == spec and not said.is_planned
        assert said.step_s == pytest.approx(pinned.predicted.step_time_s, rel=most)
        assert said.stage_s == pytest.approx(works(pinned)[part.stage], rel=most)
    assert pinned.pins == fresh.pins
    is_alike = handed(pinned) == handed(fresh)
    # Layouts of what groups hand one another are searched in turns, not together.
    open_share = most if is_alike else most + 0.01
    assert said.step_s <= (1 + open_share) * fresh.predicted.step_time_s
    if is_alike:
        assert works(pinned) == pytest.approx(works(fresh), rel=most)
        assert said.step_s == pytest.approx(fresh.predicted.step_time_s, rel=most)
    return is_alike


@pytest.mark.parametrize(
    ("key", "level"),
    covering(
        [
            ("params['layers'][3]", "fast"),
            ("params['layers'][0]", "best"),
            ("params['layers'][3]", "best"),
        ]
    ),
)
def test_what_is_said_of_a_layout_is_what_its_pin_gives(
    plan: rhino.Plan, key: str, level: str
) -> None:
    plan, spec = plan if level == "fast" else planned(level=level), P("model")
    assert agrees(plan, key, spec, planned({key: spec}, level))


def test_what_several_stages_have_is_answered_for_each() -> None:
    plan = planned()
    # Which of the two it has differs by JAX version.
    is_first = plan.why("params['tied']").spec == str(P(None, ("data", "model")))
    spec = P(None, ("model", "data") if is_first else ("data", "model"))
    fresh = planned({"params['tied']": spec})
    assert agrees(plan, "params['tied']", spec, fresh)
    why = plan.why_not("params['tied']", spec)
    (other,) = why.also
    assert (why.stage, other.stage) == (0, 1)
    text = words(why)
    assert "it is stored here, and read on stage 1, too." in text
    assert "it is stored on stage 0; this is a copy of what is read here." in text


def test_what_no_stage_waits_for_costs_little(plan: rhino.Plan) -> None:
    """A longer task of the stage that has less to do."""
    took = works(plan)
    idle, busy = took.index(min(took)), took.index(max(took))
    assert took[idle] < 0.95 * took[busy]
    path = next(x.path for x in plan.inputs if x.stage == idle and "layers" in x.path)
    why = plan.why_not(path, P("model"))
    said = why.layouts[-1]
    longer = said.stage_s - why.stage_s
    assert longer > 0
    assert said.step_s - why.planned_s < 0.25 * longer
    assert f"(it waits for stage {busy}, which works longest)" in words(why)


def test_pins_and_what_cannot_be_are_said(plan: rhino.Plan) -> None:
    key = "params['layers'][0]"
    pinned = planned({key: P("model"), "params['layers'][1]": 1})
    why = pinned.why_not(key, P(None, "model"))
    assert why.spec == "P('model')"
    assert any(line.startswith(f"pinned: {key}") for line in why.forces)
    assert [x.spec for x in why.layouts] == ["P('model')", "P(None, 'model')"]
    assert "with these pins" in words(why)
    moved = pinned.why_not("params['layers'][1]", P("model"))
    assert "on stage 1 of 2, pinned there: params['layers'][1]" in words(moved)
    never = plan.why_not(key, P("stage"))
    assert never.layouts[-1].cannot or never.layouts[-1].step_s > 0
    with pytest.raises(PinError, match=r"Did you mean \"params\['layers'\]\[0\]\""):
        plan.why("params['layer'][0]")


@pytest.mark.slow
def test_what_does_not_fit_is_said() -> None:
    tight = planned(memory_budget_bytes="1.8MiB")
    why = tight.why_not("params['layers'][3]", P())
    assert not why.layouts[-1].fits
    assert "as P(), nothing fits: stage 1 does not fit: smallest peak" in words(why)
    assert "memory: without limit it would be P()." in why.forces


def test_problems_that_are_not_kept_are_solved_again(
    plan: rhino.Plan, tmp_path: Any
) -> None:
    key, spec = "params['layers'][0]", P("model")
    before = plan.why_not(key, spec)
    plan.origin.solved = None
    after = plan.why_not(key, spec)
    assert after.layouts == before.layouts and after.answer == before.answer
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match="not at hand"):
        rhino.load_plan(tmp_path / "plan.json").why(key)


def test_other_budgets_and_stages_are_planned_for_from_the_beginning(
    plan: rhino.Plan,
) -> None:
    less = plan.with_(memory_budget_bytes="2.5MiB")
    assert less.predicted.peak_bytes <= 2.5 * 2**20
    key = "params['layers'][1]"
    moved, why = plan.with_(pins={key: 1}), plan.why_not(key, 1)
    assert moved.inputs[1].stage == 1
    assert moved.predicted.step_time_s > plan.predicted.step_time_s
    assert "longer: all cut again with that pin, a step takes" in words(why)
    assert f"{format_seconds(works(moved)[1])} instead of" in words(why)
    fewer = replace(moved, stages=moved.stages[:1])
    (said,) = pinned_elsewhere(plan, key, 1, fewer, 0.0).answer
    assert said.endswith("with that pin, 1 stage(s) instead of 2.")
    with pytest.raises(PinError, match="there is no stage 2"):
        plan.why_not(key, 2)
    both = moved.with_(pins={"params['layers'][0]": P("model")})
    assert both.inputs[1].stage == 1 and both.in_specs[0]["layers"][0] == P("model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "key", "spec", "level"),
    [
        (
            "gpt-tiny",
            {},
            "params['blocks']['mlp']['up']",
            P(None, None, "model"),
            "fast",
        ),
        (
            "gpt-tiny",
            {"layers": "unroll"},
            "params['blocks'][0]['mlp']['up']",
            P("data"),
            "best",
        ),
        (
            "unet-tiny",
            {},
            "params['conv_in']['kernel']",
            P(None, None, None, "data"),
            "fast",
        ),
    ],
    ids=["scanned", "unrolled", "unet"],
)
def test_of_models(model: str, options: Any, key: str, spec: Any, level: str) -> None:
    workload = registry.get(model, **options)

    def plan_with(pins: Any = None) -> rhino.Plan:
        donated = {"donate_argnums": workload.donate_argnums, "pins": pins}
        args = workload.abstract_args()
        return rhino.plan(workload.step, *args, **{**OPTIONS, **donated}, level=level)

    plan = plan_with()
    agrees(plan, key, spec, plan_with({key: spec}))
    why = plan.why_not(key, spec)
    assert "the stages divide where stage 0 sends stage 1" in words(why)
    is_stack = options == {} and model == "gpt-tiny"
    assert [why.stage, *(x.stage for x in why.also)] == ([0, 1] if is_stack else [0])
    assert ("its part of the stack, this one layer 0 of 2" in words(why)) is is_stack


def test_stages_that_do_the_same_are_called_by_their_own_names() -> None:
    """They are searched once, and their parts of a stack have names of their own."""

    def scanned(ws: jax.Array, x: jax.Array) -> jax.Array:
        def loss(ws: jax.Array) -> jax.Array:
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)
            return jnp.mean((h - x) ** 2)

        return ws - 0.1 * jax.grad(loss)(ws)

    ws = jax.ShapeDtypeStruct((16, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    mesh = {"stage": 4, "data": 2}
    plan = rhino.plan(scanned, ws, x, **{**OPTIONS, "mesh": mesh, "level": "fast"})
    programs = [
        g.found.solved[0].mesh_problem.model.graph.program for g in groups(plan)
    ]
    assert any(
        p is not g.of.program for p, g in zip(programs, groups(plan), strict=True)
    )
    key = plan.inputs[0].path
    why = plan.why_not(key, P(None, "data"))
    for part in (why, *why.also):
        first = 4 * part.stage
        reasons = [x.reason for layout in part.layouts for x in layout.added]
        named = {r for r in reasons if f"{key}[" in r}
        assert named
        assert all(f"{key}[{first}:{first + 4}]" in r for r in named)
