"""Budgets that cannot be met: the smallest peak of all variants, and what helps."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.planner.least_memory import LeastMemory
from tests.cases import covering
from tests.helpers_coupled import normed


ROWS, WIDTH = 2048, 32
MESH = {"data": 4, "model": 2}


def plain(params: Any, x: Any) -> Any:
    """A step whose rows do not meet."""

    def loss_of(params: Any) -> Any:
        h = x
        for w in params:
            h = h + jnp.tanh(jnp.tanh(h @ w["up"]) @ w["down"])
        return jnp.mean(h * h)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments() -> tuple[Any, Any]:
    up, down = np.ones((WIDTH, 8 * WIDTH)), np.ones((8 * WIDTH, WIDTH))
    layer = {"up": up.astype(np.float32), "down": down.astype(np.float32)}
    return [layer, layer], np.ones((ROWS, WIDTH), np.float32)


def plan_within(fn: Any, budget: int, **asked: Any) -> rhino.Plan:
    return rhino.plan(
        fn,
        *arguments(),
        mesh=MESH,
        donate_argnums=0,
        progress=False,
        level="fast",
        memory_budget_bytes=budget,
        **asked,
    )


def refused(fn: Any, budget: int, **asked: Any) -> rhino.InfeasiblePlanError:
    with pytest.raises(rhino.InfeasiblePlanError) as found:
        plan_within(fn, budget, **asked)
    return found.value


@pytest.mark.parametrize(
    "asked", covering([{"microbatches": 1, "recompute": "as written"}, {}])
)
def test_the_smallest_peak_is_that_of_all_budgets_and_has_a_plan(asked: Any) -> None:
    least = refused(plain, 20_000, **asked).smallest_peak_bytes
    assert least is not None
    assert refused(plain, least - 1, **asked).smallest_peak_bytes == least
    plan = plan_within(plain, least, **asked)
    assert plan.memory_budget_bytes == least
    # What a compiled program may hold beyond the prediction is left free.
    assert plan.search.reserve_share == rhino.load_target("cpu").device.reserve_share
    assert plan.predicted.peak_bytes <= plan.usable_bytes < 0.9 * least
    told = " ".join(str(plan.table()).split())
    assert "left free: compiled programs hold up to 24 % of it more" in told


@pytest.mark.slow
def test_the_smallest_peak_is_not_searched_where_a_variant_is_seen_to_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = 2 * (refused(plain, 20_000).smallest_peak_bytes or 0)
    monkeypatch.setattr(LeastMemory, "smallest", None)
    assert plan_within(plain, budget).transforms


def test_variants_that_are_not_allowed_are_offered() -> None:
    free = refused(plain, 20_000)
    fixed = refused(plain, 20_000, microbatches=1)
    assert free.smallest_peak_bytes < fixed.smallest_peak_bytes
    assert "microbatches='auto'" in fixed.fix and "microbatches" not in free.fix


@pytest.mark.slow
def test_the_error_names_what_couples_the_batch_and_the_keyword_that_frees_it() -> None:
    error = refused(normed, 20_000)
    assert re.search(r"no micro-batches: .*helpers_coupled\.py:\d+", error.where)
    assert "per_microbatch='loss_of' (smallest peak then" in error.fix
    freed = refused(normed, 20_000, per_microbatch="loss_of").smallest_peak_bytes
    assert freed < error.smallest_peak_bytes
    plan = plan_within(normed, freed, per_microbatch="loss_of")
    assert plan.microbatches > 1
