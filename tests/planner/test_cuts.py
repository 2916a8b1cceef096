"""Micro-batches and recompute: chosen where memory asks for it, run as planned."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from tests.cases import covering
from tests.helpers_coupled import normed


ROWS, WIDTH, LAYERS = 2048, 32, 2
MESH = {"data": 4, "model": 2}


def layer(w, x):
    return jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"])


def step_of(block):
    def loss_of(params, x):
        for w in params:
            x = x + block(w, x)
        return jnp.mean(x * x)

    def step(params, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


plain, checkpointed = step_of(layer), step_of(jax.checkpoint(layer))


def arguments():
    rng = np.random.default_rng(0)
    params = [
        {
            "up": rng.normal(size=(WIDTH, 8 * WIDTH)).astype(np.float32) / 8,
            "down": rng.normal(size=(8 * WIDTH, WIDTH)).astype(np.float32) / 16,
        }
        for _ in range(LAYERS)
    ]
    return params, rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


@functools.cache
def one_device():
    """Return the results of `plain` on one device."""
    return jax.jit(plain)(*arguments())


def plan_of(fn, **asked):
    return rhino.plan(
        fn, *arguments(), mesh=MESH, donate_argnums=0, progress=False, **asked
    )


def has_remat(plan):
    return any(t.name == "recompute" for t in plan.transforms)


@pytest.fixture(scope="module")
def free():
    return plan_of(plain)


def test_what_fits_is_left_as_it_is(free):
    assert free.microbatches == 1
    assert free.variants == ()
    assert all(not t.choice for t in free.transforms)


def plan_of_half_the_memory(free):
    budget = round(0.5 * free.predicted.peak_bytes)
    return plan_of(plain, memory_budget_bytes=budget, level="fast")


def test_less_memory_takes_micro_batches_or_makes_again(free):
    budget = round(0.5 * free.predicted.peak_bytes)
    with pytest.raises(rhino.InfeasiblePlanError, match="no plan fits"):
        plan_of(
            plain,
            memory_budget_bytes=budget,
            microbatches=1,
            recompute="as written",
            level="fast",
        )
    plan = plan_of_half_the_memory(free)
    assert plan.predicted.peak_bytes <= budget
    (chosen,) = (v for v in plan.variants if v.is_chosen)
    fitting = [v.step_time_s for v in plan.variants if math.isfinite(v.step_time_s)]
    assert chosen.step_time_s == min(fitting)
    assert plan.variants[0].name == "baseline"
    assert chosen.name in plan.table()


@pytest.mark.slow
def test_plans_in_micro_batches_give_the_numbers_of_one_device(free):
    plans = [plan_of(plain, microbatches=m, level="fast") for m in (2, 3, 2048)]
    for plan in (plan_of_half_the_memory(free), *plans):
        found = plan.check(plain, *arguments())
        assert found.ok, found.table()


@pytest.mark.parametrize("count", covering([3, 2, 2048]))
def test_micro_batches_that_are_asked_for_give_the_whole_batchs_numbers(
    count, tmp_path
):
    plan = plan_of(plain, microbatches=count, level="fast")
    assert plan.microbatches == count
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.microbatches == count
    # What the file says is done again to the function as its user wrote it.
    params, loss = loaded.jit(plain)(*arguments())
    single, alone = one_device()
    assert jnp.allclose(loss, alone, rtol=1e-5)
    assert jnp.allclose(params[0]["up"], single[0]["up"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_what_is_asked_of_a_decorated_function_holds():
    options = {"mesh": MESH, "microbatches": 4, "level": "fast", "progress": False}
    sharded = rhino.auto_shard(**options)(plain)
    assert sharded.plan(*arguments()).microbatches == 4
    assert rhino.plan(sharded, *arguments(), progress=False).microbatches == 4
    loss = sharded(*arguments())[1]
    assert jnp.allclose(loss, one_device()[1], rtol=1e-5)


def test_checkpoint_is_a_wish_that_can_be_kept():
    written = plan_of(checkpointed, recompute="as written", level="fast")
    none = plan_of(checkpointed, recompute="none", level="fast")
    assert not written.variants
    assert [t.name for t in none.transforms if t.choice] == ["un-remat"]
    assert none.predicted.flops_per_device < written.predicted.flops_per_device
    auto = plan_of(checkpointed, level="fast")
    assert auto.predicted.step_time_s <= written.predicted.step_time_s


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["as written", "none", "auto"])
def test_checkpointed_layers_give_the_same_numbers(recompute):
    plan = plan_of(checkpointed, recompute=recompute, level="fast")
    assert plan.check(checkpointed, *arguments()).ok


def test_where_nothing_fits_the_error_says_what_was_tried():
    with pytest.raises(rhino.InfeasiblePlanError) as found:
        plan_of(plain, memory_budget_bytes=20_000, level="fast")
    assert "smallest peaks: baseline" in found.value.numbers
    assert "micro-batches" in found.value.numbers


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "a whole number, 1 or more"),
        ("four", "microbatches must be 'auto' or a whole number"),
        (1.5, "a whole number"),
        (ROWS + 1, f"cannot run in {ROWS + 1} micro-batches"),
    ],
)
def test_micro_batches_that_cannot_be(value, words):
    with pytest.raises(rhino.RhinoError, match=words):
        plan_of(plain, microbatches=value)


def test_loops_for_sums_over_the_batch_are_noted_with_their_cost():
    def centred(w, x):
        h = jnp.tanh(x @ w)
        return jnp.sum(jnp.tanh((h - h.mean(0)) @ w))

    w, x = (np.ones((n, WIDTH), np.float32) for n in (WIDTH, ROWS))
    asked = {"mesh": {"data": 8}, "microbatches": 2, "level": "fast"}
    noted = rhino.plan(centred, w, x, progress=False, **asked).notes
    assert any("in 2 loops, which compute 49% of the FLOPs" in n for n in noted)
    assert any("per_microbatch=['centred'] takes" in n for n in noted)
    asked["per_microbatch"] = "centred"
    noted = rhino.plan(centred, w, x, progress=False, **asked).notes
    assert not any("loops" in n for n in noted)


@pytest.mark.slow
def test_what_is_refined_is_never_slower_than_as_it_is_written():
    """Once compiled: a variant is only predicted to be faster."""

    def compiled_s(plan):
        return min(c.compiled_s for c in plan.refined if c.is_fitting)

    written = plan_of(checkpointed, recompute="as written", refine=1, level="fast")
    auto = plan_of(checkpointed, refine=1, level="fast")
    assert compiled_s(auto) <= 1.0001 * compiled_s(written)


def test_statistics_of_each_micro_batch_are_asked_for_by_name(tmp_path):
    refused = pytest.raises(rhino.MicrobatchError, match="rows meet again")
    with refused as found:
        plan_of(normed, microbatches=4, level="fast")
    assert "helpers_coupled.py" in found.value.where
    assert "per_microbatch='loss_of'" in found.value.fix
    plan = plan_of(normed, microbatches=4, per_microbatch="loss_of", level="fast")
    assert plan.microbatches == 4
    (note,) = (n for n in plan.notes if "per_microbatch" in n)
    assert "each of the 4 micro-batches" in note
    assert note in " ".join(plan.table().split())
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.notes == plan.notes
    assert plan.transforms == loaded.transforms


@pytest.mark.slow
def test_statistics_of_each_micro_batch_are_those_by_hand(tmp_path):
    plan = plan_of(normed, microbatches=4, per_microbatch="loss_of", level="fast")
    plan.save(tmp_path / "plan.json")
    params, x = arguments()
    loss = rhino.load_plan(tmp_path / "plan.json").jit(normed)(params, x)[1]
    loss_of = jax.jit(lambda params, x: normed(params, x)[1])
    by_hand = sum(loss_of(params, x[i::4]) for i in range(4)) / 4
    assert jnp.allclose(loss, by_hand, rtol=1e-5)
    assert not jnp.allclose(loss, loss_of(params, x), rtol=1e-5)
    # Beside one device that takes them so, too.
    assert plan.check(normed, params, x).ok


@pytest.mark.slow
def test_where_memory_asks_for_it_named_statistics_are_cut():
    free = plan_of(normed, per_microbatch="loss_of", level="fast")
    assert free.microbatches == 1 and not free.notes
    budget = round(0.6 * free.predicted.peak_bytes)
    asked = {"memory_budget_bytes": budget, "recompute": "as written", "level": "fast"}
    with pytest.raises(rhino.InfeasiblePlanError):
        plan_of(normed, **asked)
    plan = plan_of(normed, per_microbatch=["loss_of"], **asked)
    assert plan.microbatches > 1 and plan.predicted.peak_bytes <= budget


def test_a_name_of_nothing_is_refused():
    with pytest.raises(rhino.MicrobatchError, match="'loss_of'") as found:
        plan_of(normed, per_microbatch="los_of")
    assert "'los_of'" in found.value.where and "ops" in found.value.numbers
    assert "module" in found.value.fix


def test_micro_batches_under_the_mesh_of_a_context():
    """Whose axes are Explicit, as those of `jax.make_mesh` are."""

    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
        return w - gradient, value

    w, x = jnp.ones((8, 8)) / 8, jnp.arange(128.0).reshape(16, 8) / 128
    expected = jax.jit(step)(w, x)
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        got = rhino.auto_shard(step, microbatches=4)(w, x)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["900KiB", "1200KiB", "2MiB"])
@pytest.mark.parametrize("step", [checkpointed, plain])
def test_the_best_level_is_never_worse_than_the_fast_one(step, budget):
    fast, best = (
        plan_of(step, level=level, memory_budget_bytes=budget).predicted.step_time_s
        for level in ("fast", "best")
    )
    assert best <= fast * (1 + 1e-4)
