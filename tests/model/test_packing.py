"""Combined reductions share their latency; on GPUs they cost kernels that pack them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import MeshProblem, Request
from rhino_jax.solver.overlap import Wait
from tests.verify.extras import skipped_without_extra


AXES = (("data", 4), ("model", 2))
X = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
W = jax.ShapeDtypeStruct((256, 256), jnp.float32)
TARGET = load_target("h100:8")


def step(weights: Any, x: Any) -> Any:
    def loss(ws: Any) -> jax.Array:
        y = x
        for w in ws:
            y = jnp.tanh(y @ w)
        return jnp.sum(y**2)

    grads = jax.grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]


def mesh_problem(*, combines: bool) -> MeshProblem:
    program = trace(step, ([W] * 4, X), {}, donate_argnums=0).program
    target = TARGET.replace(combines=combines)
    request = Request(memory_budget_bytes=1e12, pins={}, output_pins={})
    return build_mesh_problem(ProgramAnalysis.of(program, target), AXES, request)


@pytest.fixture(scope="module")
def added() -> dict[Any, float]:
    """(reduced over, scattered dims) of a free gradient → seconds that packing adds."""
    with_, without = mesh_problem(combines=True), mesh_problem(combines=False)
    found: dict[Any, float] = {}
    for node in with_.model.graph.nodes:
        mine, other = (d.model.options[node.id] for d in (with_, without))
        for k, s in enumerate(mine.strategies):
            seconds = float(mine.compute_s[k] - other.compute_s[k])
            saved = float(other.cost_s[k] - mine.cost_s[k]) + seconds
            if not s.partial:
                assert seconds == saved == 0
            elif node.op is not None and node.op.name == "dot_general":
                pairs = zip(s.made[0], s.results[0], strict=True)
                scattered = [b[len(a) :] for a, b in pairs]
                if sum(map(len, scattered)) in (0, len(s.partial)):
                    dims = tuple(d for d, axes in enumerate(scattered) if axes)
                    key = tuple(sorted(s.partial)), dims
                    found[key] = max(seconds, found.get(key, 0.0))
    return found


def test_a_scatter_by_rows_is_free_and_one_by_columns_is_not(
    added: dict[Any, float],
) -> None:
    # A weight's gradient is made transposed: its rows are the weight's columns.
    rows, columns = added[(0, 1), (1,)], added[(0, 1), (0,)]
    assert rows == 0
    shard = 256 * 256 / 8
    rate = TARGET.device.hbm_bytes_per_s * TARGET.device.memory_efficiency
    assert columns == pytest.approx(TARGET.device.launch_s + 2 * 4 * shard / rate)


def test_an_all_reduce_is_copied_to_a_buffer_and_sliced_out(
    added: dict[Any, float],
) -> None:
    rate = TARGET.device.hbm_bytes_per_s * TARGET.device.memory_efficiency
    assert added[(0, 1), ()] == pytest.approx(
        TARGET.device.launch_s + 4 * 4 * 256 * 256 / rate
    )


def test_what_is_combined_pays_little_of_its_latency() -> None:
    with_, without = mesh_problem(combines=True), mesh_problem(combines=False)
    latency_s = 2 * 3 * TARGET.tiers[0].alpha_s
    saved = [
        float((b.cost_s - b.compute_s).max() - (a.cost_s - a.compute_s).max())
        for node, a, b in zip(
            with_.model.graph.nodes,
            with_.model.options,
            without.model.options,
            strict=True,
        )
        if node.op is not None and node.op.name == "dot_general"
        if with_.model.analysis.slack.nodes[node.id] == Wait.FREE
    ]
    assert saved == pytest.approx([0.94 * latency_s] * 4)


@pytest.mark.slow
@pytest.mark.compile_only
def test_batch_norms_take_as_long_as_their_combined_reductions() -> None:
    """XLA:TPU runs 48 planned all-reduces of data parallelism as 17, and 22 of the best
    plan as 9."""

    def norm(p: Any, x: Any) -> jax.Array:
        mean = x.mean(0)
        scale = jax.lax.rsqrt(jnp.square(x - mean).mean(0) + 1e-5)
        return (x - mean) * scale * p["scale"] + p["bias"]

    def train(layers: Any, x: Any) -> Any:
        def loss(layers: Any) -> jax.Array:
            y = x
            for p in layers:
                h = jax.nn.relu(norm(p["up"], y @ p["up"]["w"]))
                y = norm(p["down"], h @ p["down"]["w"]) + norm(p, y @ p["w"])
            return jnp.square(y).mean()

        return jax.tree.map(lambda p, g: p - g, layers, jax.grad(loss)(layers))

    one = {"w": W, "scale": W.update(shape=(256,)), "bias": W.update(shape=(256,))}
    args = (
        [{"up": one, "down": one, **one} for _ in range(2)],
        X.update(shape=(4096, 256)),
    )
    best = rhino.plan(
        train, *args, mesh={"data": 8}, hardware="v5e:2x4", donate_argnums=0
    )
    for plan, within in (best.recipe("dp"), 0.2), (best, 0.3):
        with skipped_without_extra():
            found = plan.verify(train, *args, compile_for="v5e:2x4")
        assert found.time_ok and found.traffic_ok and found.compiled is not None
        assert plan.predicted.communication_s == pytest.approx(
            found.compiled.communication_s, rel=within
        )
        assert found.planned_wire_bytes == pytest.approx(found.wire_bytes, rel=0.1)
    print(found.table())
