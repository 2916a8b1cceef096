"""Of several plans, the one that the compiler makes fastest within memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Predicted
from rhino_jax.planner.search.records import PlanCandidate
from rhino_jax.verify.hlo.records import Reading
from rhino_jax.verify.refine import refine


@pytest.fixture(scope="module")
def plan() -> PlanData:
    return rhino.plan(lambda x: x @ x, jnp.ones((8, 8)), mesh={"x": 8}, hardware="v5e")


def named(plan: PlanData, name: str, peak_bytes: int = 100) -> PlanCandidate:
    predicted = Predicted(1.0, 1.0, 0.0, peak_bytes, 0.0)
    return PlanCandidate(name, replace(plan, program_name=name, predicted=predicted))


def judge(**figures: tuple[float, int]) -> Callable[[PlanData], Reading]:
    """Name → (seconds, bytes) of what the compiler makes of it."""

    def read(plan: PlanData) -> Reading:
        seconds, peak_bytes = figures[plan.program_name]
        return Reading(
            platform="tpu",
            compiled=Predicted(seconds, seconds, 0.0, peak_bytes, 0.0),
            collectives=(),
        )

    return read


def never(budget_bytes: int) -> None:
    raise AssertionError("something fits: no other plan is needed")


def test_the_fastest_that_fits_is_kept(plan: PlanData) -> None:
    candidates = [named(plan, n) for n in ("a", "b", "c")]
    read = judge(a=(3.0, 90), b=(2.0, 100), c=(1.0, 101))
    kept = refine(candidates, read, 100, never)
    assert kept.program_name == "b"
    assert [(c.name, c.compiled_s, c.is_fitting) for c in kept.refined] == [
        ("a", 3.0, True),
        ("b", 2.0, True),
        ("c", 1.0, False),
    ]
    assert "requested of the compiler" in kept.table()


def test_the_first_of_equals_is_kept(plan: PlanData) -> None:
    candidates = [named(plan, n) for n in ("a", "b")]
    kept = refine(candidates, judge(a=(1.0, 1), b=(1.0, 1)), 100, never)
    assert kept.program_name == "a"


def test_where_nothing_fits_plans_are_made_for_less(plan: PlanData) -> None:
    asked: list[int] = []

    def within(budget_bytes: int) -> PlanCandidate:
        asked.append(budget_bytes)
        return named(plan, f"less{len(asked)}", peak_bytes=budget_bytes)

    read = judge(a=(1.0, 150), less1=(2.0, 110), less2=(3.0, 100))
    kept = refine([named(plan, "a")], read, 100, within)
    assert kept.program_name == "less2"
    # The first aims at 100 / (150 / 100), the second knows a smaller excess at most.
    assert asked[0] == int(100 / 1.5 * 0.97)
    assert len(kept.refined) == 3 and not kept.notes
    assert kept.memory_budget_bytes == 100


def test_where_nothing_ever_fits_it_says_so(plan: PlanData) -> None:
    read = judge(a=(1.0, 300), b=(2.0, 200))
    kept = refine([named(plan, "a"), named(plan, "b")], read, 100, lambda _: None)
    assert kept.program_name == "b"
    assert "no plan of 2 fits once compiled" in kept.notes[-1]


def test_where_the_compiler_fails_the_others_are_kept(plan: PlanData) -> None:
    def read(asked: PlanData) -> Reading:
        if asked.program_name == "a":
            raise jax.errors.JaxRuntimeError("INTERNAL: no tiles\nmore")
        return judge(b=(2.0, 10))(asked)

    kept = refine([named(plan, "a"), named(plan, "b")], read, 100, never)
    assert kept.program_name == "b"
    assert kept.notes[-1] == "the compiler failed on a: INTERNAL: no tiles"
    with pytest.raises(jax.errors.JaxRuntimeError, match="no tiles"):
        refine([named(plan, "a")], read, 100, never)


def test_a_refined_plan_is_saved_and_read_back(plan: PlanData, tmp_path) -> None:
    kept = refine([named(plan, "a")], judge(a=(2.0, 10)), 100, never)
    kept.save(tmp_path / "plan.json")
    assert rhino.load_plan(tmp_path / "plan.json").refined == kept.refined


def test_refine_compiles_for_the_devices_at_hand() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w[:, :32]

    args = (jnp.ones((64, 64)), jnp.ones((4096, 64)))
    kept = rhino.plan(step, *args, mesh={"x": 8}, refine=3, progress=False)
    names = {c.name for c in kept.refined}
    assert "dp@batch" in names and 2 <= len(names) <= 3 + 3
    fitting = [c.compiled_s for c in kept.refined if c.is_fitting]
    assert min(fitting) > 0
    assert jnp.allclose(kept.jit(step)(*args), step(*args), rtol=1e-4)


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_a_bad_number_is_refused(value) -> None:
    with pytest.raises(
        rhino.RhinoError, match="refine must be 'auto' or a whole number"
    ):
        rhino.plan(lambda x: x, jnp.ones(8), mesh={"x": 8}, refine=value)


def test_refine_compiles_for_the_hardware_that_is_named() -> None:
    """Here not for the CPU devices that are present: nobody knows a v9z."""
    target = rhino.load_target("v5e").replace(name="v9z", kinds=("TPU v9z",))
    with pytest.raises(rhino.HardwareError, match="v9z"):
        rhino.plan(
            lambda x: x @ x,
            jnp.ones((8, 8)),
            mesh={"x": 8},
            hardware=target,
            refine=2,
            progress=False,
        )
