"""State that a plan offloads, where nothing fits otherwise."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rhino_jax as rhino
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.frontend.trace import trace
from rhino_jax.ir.transform import OFFLOADED
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.offload import PASS
from rhino_jax.passes.program_pass import NO_LIMITS


WIDTH, LAYERS = 256, 4
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, eps=1e-4))


def loss_of(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def step(params: Any, state: Any, x: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(params, x)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def parameters() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]


def batch() -> Any:
    return np.random.default_rng(0).normal(size=(32, WIDTH)).astype(np.float32)


def arguments() -> Any:
    params = parameters()
    return params, OPTIMIZER.init(params), batch()


OPTIONS: dict[str, Any] = {
    "mesh": {"x": 8},
    "hardware": "v5e:2x4",
    "level": "fast",
    "donate_argnums": (0, 1),
    "progress": False,
}


FIXED = OPTIONS | {"recompute": "none", "microbatches": 1}


def budget_of(budget: int, **options: Any) -> int:
    """Return the smallest budget for which there is a plan; the given one has none."""
    with pytest.raises(InfeasiblePlanError) as refused:
        planned(budget, **options)
    found = re.search(r"raise memory_budget_bytes to (\d+)", refused.value.fix)
    assert found is not None
    return int(found[1])


@cache
def least_budget() -> int:
    return budget_of(1 << 17)


def planned(budget: int, **options: Any) -> Any:
    options = FIXED | {"memory_budget_bytes": budget} | options
    return rhino.plan(step, *arguments(), **options)


def test_state_is_offloaded_where_nothing_fits_otherwise(tmp_path: Path) -> None:
    least = least_budget()
    assert not any(leaf.on_host for leaf in planned(least, offload="auto").inputs)
    fewest = budget_of(1 << 17, offload="auto")
    # A device's shard of all moments but for the last leaf's.
    assert fewest <= least - (LAYERS - 1) * 2 * WIDTH * WIDTH * 4 // 8
    plan = planned(fewest, offload="auto")
    paths = {leaf.path for leaf in plan.inputs if leaf.on_host}
    assert paths == {
        f"state[1][0].{m}[{i}]" for m in ("mu", "nu") for i in range(LAYERS)
    }
    assert any("8 arrays of state, " in note for note in plan.notes)

    assert plan.check(step, *arguments()).ok
    wanted = jax.jit(step)(*arguments())
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    for each in (plan, loaded.with_mesh(plan.mesh)):
        run = each.jit(step)
        found = run(*arguments())
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        params, state, _ = found
        assert state[1][0].mu[0].sharding.memory_kind == "pinned_host"
        # What came back from the host is not another signature.
        params, state, _ = run(params, state, batch())
        assert state[1][0].nu[0].sharding.memory_kind == "pinned_host"


def test_half_of_the_state_is_enough_where_it_is() -> None:
    traced = trace(step, arguments(), {}, donate_argnums=(0, 1))
    half, every = (t.chosen["inputs"] for t in PASS.choices(traced, NO_LIMITS))
    assert len(half) == LAYERS
    assert len(every) == 2 * LAYERS
    plan = planned(least_budget() - WIDTH * WIDTH * 4 // 8, offload="auto")
    (taken,) = [t.chosen["inputs"] for t in plan.transforms if t.name == OFFLOADED]
    assert taken == half


def test_weights_and_what_is_not_donated_stay() -> None:
    traced = trace(step, arguments(), {}, donate_argnums=(0,))
    assert not [*PASS.choices(traced, NO_LIMITS)]
    traced = trace(step, arguments(), {}, donate_argnums=(0, 1))
    slots = {s for t in PASS.choices(traced, NO_LIMITS) for s in t.chosen["inputs"]}
    assert {traced.program.inputs[s].path.split(".")[0] for s in slots} == {
        "state[1][0]"
    }


def test_what_is_printed_stays_and_a_copy_of_a_result_is_on_the_devices() -> None:
    def update(m: Any, v: Any, g: Any) -> Any:
        m = 0.9 * m + g
        v = 0.9 * v + g
        jax.debug.print("{}", v.sum())
        return m, v, m

    x = jnp.ones((8, 128))
    traced = trace(update, (x, 2 * x, 3 * x), {}, donate_argnums=(0, 1))
    *_, every = PASS.choices(traced, NO_LIMITS)
    assert every.chosen == {"inputs": [0]}
    after = apply_passes(traced, [every])
    hosted = [after.program.values[o.value].on_host for o in after.program.outputs]
    assert hosted == [True, False, False]
