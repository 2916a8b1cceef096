"""`refine="auto"`: costs are corrected by the compiled plan, which is planned again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.cost.corrections import OpKey
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Predicted
from rhino_jax.planner import corrected
from rhino_jax.verify.hlo.records import Reading
from rhino_jax.verify.refine import PlanProgram
from tests.verify.extras import mesh_of_target


MESH = {"x": 2, "y": 4}


def step(w: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        h = jnp.tanh(x @ w["a"])
        return jnp.mean((h @ w["b"]) ** 2)

    grads = jax.grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)


def shapes() -> tuple[Any, ...]:
    shape = jax.ShapeDtypeStruct
    weights = {"a": shape((512, 2048), "float32"), "b": shape((2048, 512), "float32")}
    return weights, shape((8192, 512), "float32")


def sorted_step(w: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    return step(w, jnp.sort(x))


def plan_of(fn: Callable[..., Any] = step, **asked: Any) -> Any:
    asked = {"mesh": MESH, "hardware": "v5e:2x4", "refine": "auto", **asked}
    return rhino.plan(fn, *shapes(), progress=False, donate_argnums=0, **asked)


Compiled = Callable[[PlanData], Predicted]


def compiler(patch: pytest.MonkeyPatch, *programs: Compiled, op: float = 1.0) -> None:
    """Compile the nth new plan as the nth function says, products in `op` times the
    seconds that are planned."""
    seen: list[PlanData] = []

    def program_of(plan: PlanData) -> PlanProgram:
        is_cached = any(plan.stages[0].decisions == p.stages[0].decisions for p in seen)
        made = Predicted(0.0, 0.0, 0.0, 0, 0.0)
        if not is_cached:
            made = programs[len(seen)](plan)
            seen.append(plan)
        reading = Reading(platform="tpu", compiled=made, collectives=())
        return PlanProgram("", None, reading, is_cached)  # type: ignore[arg-type]

    def times(
        kernels: Any, planned_s: Mapping[OpKey, float]
    ) -> tuple[dict[OpKey, float], float]:
        return {
            key: s * (op if key[2] == "dot_general" else 1.0)
            for key, s in planned_s.items()
        }, 0.0

    patch.setattr(corrected, "programs_of", lambda *_: program_of)
    patch.setattr(corrected, "op_times", times)


def taking(compute: float, communication: float = 1.0) -> Compiled:
    """Return what a plan compiles to: so many times what it predicts."""

    def made(plan: PlanData) -> Predicted:
        p = plan.predicted
        parts = compute * p.compute_s, communication * p.communication_s
        return replace(p, step_time_s=sum(parts), compute_s=parts[0],
                       communication_s=parts[1])  # fmt: skip

    return made


def test_a_plan_that_holds_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(monkeypatch, taking(1.0))
    plan, plain = plan_of(), plan_of(refine=0)
    assert [c.name for c in plan.refined] == ["as estimated"]
    assert plan.predicted.step_time_s == pytest.approx(plain.predicted.step_time_s)
    assert plan.inputs == plain.inputs


def test_the_plan_is_predicted_as_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(monkeypatch, taking(2.0), op=3.0)
    plan, plain = (plan_of(sorted_step, mesh={"x": 8}, refine=r) for r in ("auto", 0))
    (first,) = plan.refined
    assert first.predicted_s == pytest.approx(plain.predicted.step_time_s)
    assert first.compiled_s > 1.1 * first.predicted_s
    assert plan.predicted.step_time_s == pytest.approx(first.compiled_s, rel=0.02)
    products = [t for t in plan.corrections.ops if t.primitive == "dot_general"]
    others = [t for t in plan.corrections.ops if t.primitive == "sort"]
    factors = [t.compiled_s / t.estimated_s for t in (products[0], others[0])]
    assert factors[0] > 2 * factors[1]
    assert sum(t.seconds for t in plan.line_times) == pytest.approx(
        plan.predicted.step_time_s
    )


def test_another_plan_is_taken_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler(monkeypatch, taking(1.0, 4.0), taking(1.0))
    plan, plain = plan_of(), plan_of(refine=0)
    assert [c.name for c in plan.refined] == [
        "as estimated",
        "corrected by 1 compiled program",
    ]
    assert plan.inputs != plain.inputs
    assert "costs are corrected by 2 compiled programs" in plan.notes[0]
    assert plan.corrections.communication > 1.2


def test_the_first_plan_stays_where_the_second_is_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler(monkeypatch, taking(1.0, 4.0), taking(9.0, 9.0))
    plan, plain = plan_of(), plan_of(refine=0)
    assert len(plan.refined) == 2 and plan.inputs == plain.inputs
    assert plan.decisions == plain.decisions


def test_a_plan_that_does_not_fit_is_made_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_large(plan: PlanData) -> Predicted:
        peak_bytes = int(1.5 * plan.memory_budget_bytes)
        return replace(plan.predicted, peak_bytes=peak_bytes)

    compiler(monkeypatch, too_large, taking(1.0))
    plan = plan_of(memory_budget_bytes=2**25)
    assert [c.is_fitting for c in plan.refined] == [False, True]
    assert plan.memory_budget_bytes == 2**25
    assert plan.predicted.peak_bytes < plan_of(refine=0).predicted.peak_bytes


def test_what_is_learnt_is_kept_and_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("RHINO_CACHE", "1")
    monkeypatch.setenv("RHINO_CACHE_DIR", str(tmp_path / "cache"))
    other = {"mesh": {"x": 8}, "refine": 0}
    before = plan_of(**other)
    compiler(monkeypatch, taking(3.0), taking(3.0))
    plan = plan_of()
    after = plan_of(**other)
    assert after.corrections == plan.corrections
    assert after.predicted.compute_s > 2 * before.predicted.compute_s
    assert "from earlier plans" in after.notes[-1]
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.corrections == plan.corrections
    assert "costs are corrected by" in loaded.table()


def moved(lines: int) -> Callable[..., jax.Array]:
    """Return a function that begins so many lines further down."""
    text = "\n" * lines + "def chain(x):\n    y = x @ x\n    return y @ y\n"
    found: dict[str, Any] = {}
    exec(compile(text, "/no/such/chain.py", "exec"), found)
    return found["chain"]


def test_corrections_follow_code_that_moves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("RHINO_CACHE", "1")
    monkeypatch.setenv("RHINO_CACHE_DIR", str(tmp_path))
    compiler(monkeypatch, taking(2.0), taking(2.0))
    asked = {"hardware": "v5e:2x4", "mesh": MESH, "progress": False}
    x = jax.ShapeDtypeStruct((512, 512), "float32")
    plan = rhino.plan(moved(0), x, refine="auto", **asked)
    later = rhino.plan(moved(7), x, level="fast", **asked)
    lines = [{t.source for t in p.corrections.ops} for p in (plan, later)]
    assert "chain.py:2 (chain)" in lines[0] and "chain.py:9 (chain)" in lines[1]
    assert not lines[0] & lines[1]


def test_without_a_compiler_it_says_so() -> None:
    target = rhino.load_target("v5e").replace(name="v9z", kinds=("TPU v9z",))
    plan = plan_of(hardware=target, mesh={"x": 8})
    assert not plan.refined and not plan.corrections.programs
    assert any("refine='auto' compiled nothing" in note for note in plan.notes)


def test_stages_are_not_refined() -> None:
    plan = plan_of(mesh=None, stages=2, microbatches=2)
    assert not plan.refined
    assert any("`refine` compiles no plans" in note for note in plan.notes)


def test_it_holds_for_the_devices_at_hand() -> None:
    args = jax.tree.map(lambda x: jnp.ones(x.shape), shapes())
    plan = rhino.plan(
        step, *args, mesh={"x": 8}, hardware="cpu", refine="auto", progress=False
    )
    fastest = min(plan.refined, key=lambda c: c.compiled_s)
    assert plan.predicted.step_time_s == pytest.approx(fastest.compiled_s, rel=0.05)
    made, wanted = plan.jit(step)(*args), step(*args)
    assert jnp.allclose(made["a"], wanted["a"], rtol=1e-4)


@pytest.mark.compile_only
@pytest.mark.parametrize("hardware", ["h100:8"])
def test_the_final_plan_is_predicted_and_no_slower(hardware: str) -> None:
    mesh_of_target(hardware)
    plan = plan_of(hardware=hardware, mesh=None)
    fastest = min(plan.refined, key=lambda c: c.compiled_s)
    assert fastest.compiled_s <= plan.refined[0].compiled_s
    assert plan.predicted.step_time_s == pytest.approx(fastest.compiled_s, rel=0.05)
