"""The planner's choice among forms of a computation (`rhino.choose`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.ir.transform import FORMS
from rhino_jax.planner import searched as planned_forms


def left(x: Any, a: Any, b: Any) -> Any:
    return (x @ a) @ b


def right(x: Any, a: Any, b: Any) -> Any:
    return x @ (a @ b)


product = rhino.choose(left=left, right=right)
"""Fewer FLOPs from the left for x of few rows, from the right for many."""


def step(weights: Any, many: Any, few: Any) -> Any:
    def loss(weights: Any) -> Any:
        narrow, wide = weights
        y = many
        for a, b in narrow:
            y = jnp.tanh(product(y, a, b))
        z = product(few, *wide)
        return jnp.mean(y**2) + jnp.mean(z**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, gradients), value


def arguments() -> Any:
    def array(i: int, *shape: int) -> Any:
        return jax.random.normal(jax.random.key(i), shape) * 0.05

    narrow = [(array(i, 64, 2048), array(i + 9, 2048, 64)) for i in range(2)]
    wide = array(18, 512, 512), array(19, 512, 512)
    return (narrow, wide), array(20, 4096, 64), array(21, 8, 512)


def plan_of(fn: Any = step, args: Any = None, **options: Any) -> rhino.Plan:
    options = {"mesh": {"data": 4, "model": 2}, "hardware": "v5e"} | options
    args = jax.eval_shape(arguments) if args is None else args
    return rhino.plan(fn, *args, **options)


def forms_of(plan: rhino.Plan) -> list[str]:
    """The chosen forms that are not the first of their call."""
    return [f for t in plan.transforms if t.name == FORMS for f in t.chosen.values()]


def test_every_call_takes_the_form_that_is_cheaper_there() -> None:
    plan = plan_of()
    (record,) = (t for t in plan.transforms if t.name == FORMS)
    types = "float32[4096,64], float32[64,2048], float32[2048,64]"
    assert record.chosen == {f"loss: left | right of {types}": "right"}
    many, few = (n for n in plan.notes if " runs as " in n)
    assert "runs as 'right' (left" in many and "runs as 'left' (left" in few
    chosen, *others = plan.variants
    assert chosen.is_chosen and chosen.step_time_s == plan.predicted.step_time_s
    assert [o.name.rpartition(" as ")[2] for o in others] == ["left", "right"]
    assert all(o.step_time_s > chosen.step_time_s for o in others)
    assert chosen.name in plan.table()
    # The program in that form is what a program without a choice is planned as.
    pinned = plan_of(pins={f"test_forms.py:{line_of(many)}": "left"})
    assert others[0].step_time_s == pytest.approx(
        pinned.predicted.step_time_s, rel=0.02
    )


def line_of(note: str) -> str:
    return note.partition(":")[2].partition(" ")[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatches": 2},
        pytest.param(
            {"mesh": {"stage": 2, "data": 4}, "microbatches": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_results_are_those_of_the_first_form(options: Any) -> None:
    args = arguments()
    plan = plan_of(args=args, **options)
    assert forms_of(plan) == ["right"]
    got, want = plan.jit(step)(*args), step(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_check_compares_with_the_first_form() -> None:
    args = arguments()
    plan = plan_of(args=args, mesh={"data": 8})
    assert forms_of(plan) and plan.check(step, *args).ok

    def other(x: Any, a: Any, b: Any) -> Any:
        return x @ (a @ b) + 0.01

    wrong = rhino.choose(left=left, other=other)

    def one(x: Any, a: Any, b: Any) -> Any:
        return jnp.tanh(wrong(x, a, b)) * 2

    args = args[1], *args[0][0][0]
    plan = plan_of(one, args, mesh={"data": 8})
    assert forms_of(plan) == ["other"] and not plan.check(one, *args).ok


def test_saved_plans_remember(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments()
    plan = plan_of(args=args)
    plan.save(tmp_path / "plan.json")
    again = rhino.load_plan(tmp_path / "plan.json")
    assert again.transforms == plan.transforms and again.variants == plan.variants
    run = again.jit(step)
    text = run.lower(*args).as_text()
    # From the right, [64, 2048] and [2048, 64] are multiplied.
    assert "tensor<64x64xf32>" in text
    np.testing.assert_allclose(run(*args)[1], step(*args)[1], rtol=1e-5)

    monkeypatch.setitem(globals(), "product", left)
    with pytest.raises(rhino.PlanFileError, match="takes form 'right' of a call") as e:
        again.jit(step)(*args)
    assert e.value.where and e.value.numbers == "calls: none" and e.value.fix


def test_the_plan_cache_knows_the_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RHINO_CACHE", "1")
    monkeypatch.setenv("RHINO_CACHE_DIR", str(tmp_path))
    x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    a = jax.ShapeDtypeStruct((64, 2048), jnp.float32)
    b = jax.ShapeDtypeStruct((2048, 64), jnp.float32)

    def planned(**forms: Any) -> rhino.Plan:
        chosen = rhino.choose(**forms)

        def one(x: Any, a: Any, b: Any) -> Any:
            return chosen(x, a, b)

        return plan_of(one, (x, a, b))

    def twice(x: Any, a: Any, b: Any) -> Any:
        return left(x, a, b)

    assert forms_of(planned(left=left, other=twice)) == []
    assert forms_of(planned(left=left, other=right)) == ["other"]
    assert len(list(tmp_path.rglob("*"))) > 1
    monkeypatch.setattr(planned_forms, "MAX_PLANS", 0)  # nothing is searched
    assert forms_of(planned(left=left, other=right)) == ["other"]


def test_pins_choose_by_name() -> None:
    plan = plan_of()
    lines = [line_of(n) for n in plan.notes if " runs as " in n]
    assert forms_of(plan_of(pins={"*": "left"})) == []
    pins = {f"test_forms.py:{line}": "right" for line in lines}
    assert forms_of(plan_of(pins=pins)) == ["right", "right"]
    other = plan.with_(pins={f"test_forms.py:{lines[0]}": "left"})
    assert forms_of(other) == []
    assert other.predicted.step_time_s > plan.predicted.step_time_s

    def scoped(x: Any, a: Any, b: Any) -> Any:
        with jax.named_scope("mlp"), jax.named_scope("up"):
            return product(x, a, b)

    few = [
        jax.ShapeDtypeStruct(s, "float32") for s in ((8, 64), (64, 2048), (2048, 64))
    ]
    assert forms_of(plan_of(scoped, few, pins={"mlp/*": "right"})) == ["right"]


@pytest.mark.parametrize(
    ("pins", "what"),
    [
        ({"*": "rihgt"}, "there is no form 'rihgt'. Did you mean 'right'"),
        ({"model.py:1": "left"}, "no function of `rhino.choose` is called there"),
        ({"*": "left", "test_forms.py:*": "right"}, "no function"),
    ],
)
def test_pins_of_forms_that_are_not_there_are_refused(pins: Any, what: str) -> None:
    with pytest.raises(rhino.PinError) as raised:
        plan_of(pins=pins)
    assert what in raised.value.what
    assert raised.value.where and raised.value.numbers and raised.value.fix


def test_sweeps_take_pinned_forms() -> None:
    args = jax.eval_shape(arguments)
    seconds = []
    for form in ("left", "right"):
        options = {"hardware": ["v5e"], "devices": [8], "progress": False}
        swept = rhino.sweep(step, *args, pins={"*": form}, **options)
        seconds.append(swept.best.step_s)
    assert seconds[0] != seconds[1]


def fused(q: Any) -> Any:
    return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")


def plain(q: Any) -> Any:
    return jax.nn.dot_product_attention(q, q, q)


Q = jax.ShapeDtypeStruct((8, 1024, 8, 64), jnp.bfloat16)


def test_a_form_that_does_not_run_on_the_hardware_is_left() -> None:
    attend = rhino.choose(cudnn=fused, xla=plain)
    plan = plan_of(lambda q: attend(q), [Q])
    assert forms_of(plan) == ["xla"]
    assert any("not found for platform tpu" in note for note in plan.notes)
    plan = plan_of(lambda q: attend(q), [Q], hardware="h100:8")
    assert forms_of(plan) == []
    with pytest.raises(rhino.PinError, match="'cudnn' does not run on v5e"):
        plan_of(lambda q: attend(q), [Q], pins={"*": "cudnn"})
    with pytest.raises(rhino.TraceError, match="no form of a call runs on v5e") as e:
        plan_of(lambda q: rhino.choose(cudnn=fused)(q), [Q])
    assert "test_forms.py" in e.value.where and e.value.numbers and e.value.fix


def test_a_form_that_does_not_fit_is_left_for_one_that_does() -> None:
    """Scores of 2 GiB, which the library's kernel does not write."""
    attend = rhino.choose(xla=plain, cudnn=fused)
    q = jax.ShapeDtypeStruct((8, 8192, 8, 64), jnp.bfloat16)
    options = {"mesh": {"data": 4}, "hardware": "h100:4", "memory_budget_bytes": "1GiB"}
    plan = plan_of(lambda q: attend(q), [q], **options)
    assert forms_of(plan) == ["cudnn"]
    assert any("xla: InfeasiblePlanError" in note for note in plan.notes)
    with pytest.raises(rhino.InfeasiblePlanError):
        plan_of(lambda q: rhino.choose(a=plain, b=plain)(q), [q], **options)


def test_forms_may_be_called_on_shards() -> None:
    """Where they cannot be lowered alone."""

    def mean(x: Any) -> Any:
        return jax.lax.psum(x, "model") / 2

    average = rhino.choose(sum=mean, mean=lambda x: jax.lax.pmean(x, "model"))

    def on_shards(x: Any) -> Any:
        spec = jax.P("data", "model")
        return jax.shard_map(average, in_specs=spec, out_specs=jax.P("data"))(x)

    x = jax.ShapeDtypeStruct((64, 64), "float32")
    plan = plan_of(on_shards, [x], pins={"*": "mean"})
    assert forms_of(plan) == ["mean"]


def test_what_gains_too_little_does_not_change_the_program() -> None:
    """As little as predictions of two programs are off."""

    def longer(x: Any, a: Any) -> Any:
        return x @ a + jnp.mean(a[:16])

    def shorter(x: Any, a: Any) -> Any:
        return x @ a + a[0, 0]

    args = [jax.ShapeDtypeStruct(s, "float32") for s in ((8192, 4096), (4096, 4096))]
    plan = plan_of(lambda x, a: rhino.choose(a=longer, b=shorter)(x, a), args)
    first, other = (v.step_time_s for v in plan.variants)
    assert forms_of(plan) == [] and 0.97 * first < other < first


def test_plans_of_many_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_forms, "MAX_PLANS", 2)
    plan = plan_of()
    assert forms_of(plan) == ["right"]
    assert any("right: not planned" in note for note in plan.notes)
