"""Programs whose best plan is known, found without being told."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache

import pytest
from jax.sharding import PartitionSpec

import rhino_jax as rhino
from rhino_jax.hardware.target import Target
from rhino_jax.models import registry
from rhino_jax.plan.plan import PlanData
from tests.cases import covering, without_reserve
from tests.search.zoo import planned


def specs_of(plan: PlanData, part: str) -> list[tuple]:
    return [leaf.spec for leaf in plan.inputs if part in leaf.path]


def kinds_above(plan: PlanData, least_bytes: int) -> Counter:
    return Counter((c.kind, c.axes) for c in plan.collectives if c.bytes >= least_bytes)


ONE_AXIS = Target.pure_communication({"x": (1e-6, 1e9)})


def test_a_large_batch_is_data_parallel() -> None:
    plan = planned("mlp-data", {"x": 4}, ONE_AXIS)
    assert plan.search.status == "optimal"
    assert set(specs_of(plan, "weight")) == {((), ())}
    assert specs_of(plan, "batch['x']") == [((0,), ())]
    # One all-reduce of each weight's gradient, and the loss.
    assert kinds_above(plan, 100) == {("all-reduce", ("x",)): 6}
    assert plan.predicted.step_time_s == pytest.approx(
        plan.recipes["dp"].step_time_s, rel=1e-9
    )


def test_a_small_batch_is_column_row_tensor_parallel() -> None:
    plan = planned("mlp-tensor", {"x": 4}, ONE_AXIS)
    assert plan.search.status == "optimal"
    # Three all-reduces forward, two backward (the input needs no gradient).
    assert kinds_above(plan, 100) == {("all-reduce", ("x",)): 5}
    weights = [s for s in specs_of(plan, "params") if len(s) == 2]
    assert weights == [((), (0,)), ((0,), ())] * 3


def test_a_slow_first_axis_takes_the_batch_and_a_fast_second_the_weights() -> None:
    """With 5·batch < 12·width < 10·batch, reducing activations over the fast axis and
    gradients over the slow one beats one kind on both."""
    target = Target.pure_communication({"slow": (1e-6, 2e8), "fast": (1e-6, 1e9)})
    work = registry.get("mlp-tensor", batch=384, width=256)
    plan = planned(work, {"slow": 2, "fast": 2}, target)
    mix = plan.recipes["megatron"].step_time_s
    assert mix < plan.recipes["dp"].step_time_s
    assert plan.predicted.step_time_s <= mix
    # The slow axis carries the gradients of weights that the fast axis cuts. (The
    # first two layers do better still: the input needs no gradient.)
    kinds = kinds_above(plan, 10_000)
    assert kinds[("all-reduce", ("slow",))] == 4
    # An all-reduce is a reduce-scatter and an all-gather.
    halves = {kind: 1 + (kind == "all-reduce") for kind, _ in kinds}
    fast = sum(halves[k] * n for (k, axes), n in kinds.items() if axes == ("fast",))
    assert fast == 10
    assert not any("all-to-all" in kind for kind, _ in kinds)


def test_experts_go_on_an_axis_and_tokens_move_by_all_to_all() -> None:
    work = registry.get("moe-1.3b", batch=16, num_layers=2)
    plan = planned(work, {"x": 8}, "h100", level="fast")
    for weight in ("['up']", "['down']"):
        (spec,) = specs_of(plan, f"params['groups']['sparse']['experts']{weight}")
        assert spec[1] == (0,), "the experts' dim is cut"
    moved = kinds_above(plan, 10_000_000)
    assert moved[("all-to-all", ("x",))] >= 4


@pytest.mark.parametrize(
    ("batch", "overlap_share", "num_layers"), covering([(1, 0.1, 1), (2, 0.0, 2)])
)
def test_a_small_batch_transformer_cuts_heads_and_hidden_width(
    batch: int, overlap_share: float, num_layers: int
) -> None:
    """With more work, what compute can hide makes moving weights as good."""
    target = rhino.load_target("h100").replace(overlap_share=overlap_share)
    work = registry.get("gpt-medium", batch=batch, num_layers=num_layers)
    plan = planned(work, {"x": 8}, target)
    for block in range(num_layers):
        (qkv,) = specs_of(plan, f"params['blocks'][{block}]['attention']['qkv']")
        assert qkv == ((), (), (0,), ())
        (up,) = specs_of(plan, f"params['blocks'][{block}]['mlp']['up']")
        (down,) = specs_of(plan, f"params['blocks'][{block}]['mlp']['down']")
        assert (up, down) == (((), (0,)), ((0,), ()))
    assert plan.predicted.step_time_s <= plan.recipes["megatron"].step_time_s
    assert plan.recipes["megatron"].step_time_s < plan.recipes["dp"].step_time_s / 2


def test_a_tight_budget_spreads_weights_and_optimizer_state() -> None:
    work = registry.get("mlp-data", optimizer="adamw", width=256, batch=512)

    def at(budget: int | None) -> PlanData:
        return planned(work, {"x": 4}, ONE_AXIS, memory_budget_bytes=budget)

    def state_bytes(plan: PlanData) -> int:
        return sum(x.bytes_per_device for x in plan.inputs if "batch" not in x.path)

    free = at(None)
    tight = at(int(free.predicted.peak_bytes * 0.6))
    assert tight.predicted.peak_bytes <= free.predicted.peak_bytes * 0.6
    assert state_bytes(tight) < 0.6 * state_bytes(free)
    assert tight.predicted.step_time_s >= free.predicted.step_time_s
    assert tight.search.bound_s <= tight.search.objective_s


@pytest.mark.slow
def test_time_never_falls_as_the_budget_shrinks_until_nothing_fits() -> None:
    work = registry.get("mlp-tensor", optimizer="adamw", depth=3)
    times: list[float] = []
    budget, target = 1_400_000, without_reserve("h100")
    with pytest.raises(rhino.InfeasiblePlanError) as error:
        while True:
            plan = planned(work, {"x": 4}, target, memory_budget_bytes=budget)
            assert plan.predicted.peak_bytes <= budget
            times.append(plan.predicted.step_time_s)
            budget = int(budget * 0.9)
    assert len(times) > 3
    assert all(a <= b * (1 + 1e-6) for a, b in itertools.pairwise(times))
    text = str(error.value)
    assert "smallest peak found" in text
    assert "memory budget" in text
    assert "raise memory_budget_bytes" in text


LINE, GRID = (("x", 8),), (("x", 2), ("y", 4))


@cache
def plan_of(name: str, mesh: tuple[tuple[str, int], ...]) -> PlanData:
    return planned(name, dict(mesh), "v5e")


@pytest.mark.parametrize(
    ("name", "mesh"),
    covering(
        itertools.product(["gpt-tiny", "rnn-tiny", "unet-tiny"], [LINE, GRID]),
        [("gpt-tiny", GRID), ("rnn-tiny", LINE)],
    ),
)
def test_the_plan_never_costs_more_than_a_recipe_that_fits(
    name: str, mesh: tuple[tuple[str, int], ...]
) -> None:
    plan = plan_of(name, mesh)
    fitting = [
        r.step_time_s
        for r in plan.recipes.values()
        if r is not None and r.peak_bytes <= plan.memory_budget_bytes
    ]
    assert fitting
    assert plan.predicted.step_time_s <= min(fitting) * (1 + 1e-9)
    assert plan.search.bound_s <= plan.search.objective_s


def test_the_same_input_gives_the_same_plan() -> None:
    first = plan_of("rnn-tiny", LINE)
    again = planned("rnn-tiny", dict(LINE), "v5e")
    assert first.decisions == again.decisions
    assert first.predicted == again.predicted


def test_a_pin_that_cannot_fit_is_named_with_what_dropping_it_gains() -> None:
    work = registry.get("mlp-tensor", optimizer="adamw")
    path = "params['layer_3']['weight']"
    with pytest.raises(rhino.InfeasiblePlanError) as error:
        planned(
            work,
            {"x": 4},
            "h100",
            memory_budget_bytes=1_600_000,
            pins={path: PartitionSpec(), "params['layer_0']*": PartitionSpec("x")},
        )
    where, fix = error.value.where, error.value.fix
    assert f"pin {path} = P()" in where
    assert "layer_0" not in where
    assert f"drop the pin {path}" in fix
    assert "memory budget 1.53 MiB" in where


def test_a_time_limit_too_short_falls_back_to_the_best_recipe_and_says_so() -> None:
    plan = planned("gpt-tiny", {"x": 2, "y": 4}, "v5e", time_limit_s=1e-6)
    assert plan.search.status == "recipe"
    assert any("best recipe" in note for note in plan.notes)
    assert plan.predicted.step_time_s == pytest.approx(
        min(r.step_time_s for r in plan.recipes.values() if r is not None)
    )
