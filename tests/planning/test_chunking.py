"""The loss of a long vocabulary in chunks: chosen where memory asks for it."""

from __future__ import annotations

import jax
import pytest

import rhino_jax as rhino
from rhino_jax.models import registry


MESH = {"data": 4, "model": 2}
WORKLOAD = registry.get(
    "gpt-tiny", vocab=16384, d_model=32, seq_len=128, batch=16, optimizer="sgd"
)


def plan_of(**asked):
    step, args = WORKLOAD.step, WORKLOAD.abstract_args()
    usual = {"mesh": MESH, "level": "fast", "progress": False}
    donate = WORKLOAD.donate_argnums
    return rhino.plan(step, *args, donate_argnums=donate, **(usual | asked))


@pytest.fixture(scope="module")
def free():
    return plan_of()


def test_what_fits_is_left_whole(free):
    assert not any(t.name == "chunks" for t in free.transforms)


def test_less_memory_takes_chunks_of_the_loss(free, tmp_path):
    budget = round(0.4 * free.predicted.peak_bytes)
    with pytest.raises(rhino.InfeasiblePlanError):
        plan_of(memory_budget_bytes=budget, microbatches=1)
    plan = plan_of(memory_budget_bytes=budget)
    assert plan.predicted.peak_bytes <= budget
    assert any("chunks of the loss" in v.name for v in plan.variants)
    (chunks,) = (t for t in plan.transforms if t.name == "chunks")
    assert chunks.chosen["count"] in (4, 16) and plan.microbatches == 1
    (best,) = (v for v in plan.variants if v.is_chosen)
    assert best.step_time_s == min(v.step_time_s for v in plan.variants)
    assert "chunks" in best.name
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.transforms == plan.transforms
    args = WORKLOAD.make_args(jax.random.key(0))
    assert loaded.check(WORKLOAD.step, *args).ok


def test_short_rows_are_not_tried():
    small = registry.get("gpt-tiny", optimizer="sgd")
    step, args, usual = small.step, small.abstract_args(), {"level": "fast"}
    usual |= {"mesh": MESH, "progress": False, "recompute": "as written"}
    usual |= {"donate_argnums": small.donate_argnums}
    free = rhino.plan(step, *args, **usual)
    budget = round(0.9 * free.predicted.peak_bytes)
    plan = rhino.plan(step, *args, memory_budget_bytes=budget, **usual)
    assert plan.variants and not any("chunks" in v.name for v in plan.variants)
