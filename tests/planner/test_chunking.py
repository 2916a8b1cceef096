"""The loss of a long vocabulary in chunks: chosen where memory asks for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.models import registry


VOCABULARY, WIDTH, ROWS, LENGTH = 4096, 32, 16, 64
MESH = {"data": 4, "model": 2}


def train_step(params, tokens):
    """A language model of one layer, trained by SGD."""

    def loss_of(params):
        h = jnp.tanh(params["embedding"][tokens[:, :-1]] @ params["layer"])
        logits = h @ params["embedding"].T
        logits = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)
        return -picked.mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments(vocabulary=VOCABULARY):
    rng = np.random.default_rng(0)
    params = {
        "embedding": rng.normal(0, 0.1, (vocabulary, WIDTH)).astype(np.float32),
        "layer": rng.normal(0, 0.1, (WIDTH, WIDTH)).astype(np.float32),
    }
    tokens = rng.integers(0, vocabulary, (ROWS, LENGTH + 1)).astype(np.int32)
    return params, tokens


def plan_of(args=None, **asked):
    options = {"mesh": MESH, "level": "fast", "progress": False, "donate_argnums": 0}
    return rhino.plan(train_step, *(args or arguments()), **options, **asked)


@pytest.fixture(scope="module")
def free():
    return plan_of()


def budget_of(free):
    return round(0.4 * free.predicted.peak_bytes)


def test_what_fits_is_left_whole(free):
    assert not any(t.name == "chunks" for t in free.transforms)


def test_less_memory_takes_chunks_of_the_loss(free, tmp_path):
    budget = budget_of(free)
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


@pytest.mark.slow
def test_a_loss_in_chunks_is_that_of_one_device(free, tmp_path):
    plan_of(memory_budget_bytes=budget_of(free)).save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert any(t.name == "chunks" for t in loaded.transforms)
    assert loaded.check(train_step, *arguments()).ok


def test_short_rows_are_not_tried():
    args, options = arguments(8), {"recompute": "as written"}
    free = plan_of(args, **options)
    budget = round(0.9 * free.predicted.peak_bytes)
    plan = plan_of(args, memory_budget_bytes=budget, **options)
    assert plan.variants and not any("chunks" in v.name for v in plan.variants)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "changes", "takes_chunks"),
    [
        (0.4, {"vocab": 16384, "d_model": 32, "seq_len": 128, "batch": 16}, True),
        (0.9, {}, False),
    ],
    ids=["long rows", "short rows"],
)
def test_a_gpt_takes_chunks_of_long_rows(share, changes, takes_chunks):
    work = registry.get("gpt-tiny", optimizer="sgd", **changes)
    options = {"mesh": MESH, "level": "fast", "progress": False}
    options |= {"donate_argnums": work.donate_argnums}
    if not takes_chunks:
        options["recompute"] = "as written"
    args = work.make_args(jax.random.key(0))
    free = rhino.plan(work.step, *args, **options)
    assert not any(t.name == "chunks" for t in free.transforms)
    budget = round(share * free.predicted.peak_bytes)
    plan = rhino.plan(work.step, *args, memory_budget_bytes=budget, **options)
    assert plan.variants and plan.predicted.peak_bytes <= budget
    assert any("chunks" in v.name for v in plan.variants) == takes_chunks
    assert any(t.name == "chunks" for t in plan.transforms) == takes_chunks
    if takes_chunks:
        assert plan.check(work.step, *args).ok
