"""Rows sent to the parts of their experts, in as many rounds as tokens need."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rhino_jax.frontend.regions import inner_equations
from rhino_jax.frontend.rules.dot import RAGGED_DOTS
from rhino_jax.frontend.trace import trace
from rhino_jax.ir.transform import EXPERTS, chosen
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.experts.buffers import Buffers, num_slots
from tests.cases import covering
from tests.passes.experts.mixtures import (
    EXPERTS as NUM_EXPERTS,
    LAYERS,
    WIDTH,
    balanced,
    batch,
    in_blocks,
    on_devices,
    params,
    step_of,
)
from tests.passes.experts.test_sort_in_blocks import group_sizes, same


@pytest.mark.parametrize(
    ("layer", "count", "parts", "groups"),
    covering(
        ALL := [
            (layer, *division)
            for layer in (*LAYERS, balanced)
            for division in [(4, 2, 2), (4, 3, 4), (8, 3, 2)]
        ],
        ALL[::5],
    ),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_blocks_in_groups(layer: Any, count: int, parts: int, groups: int) -> None:
    step, args = step_of(layer, "checkpoint"), (params(2), batch(8, 3))
    run, closed = in_blocks(step, args, count, parts, groups)
    assert group_sizes(closed) == {(parts, groups, NUM_EXPERTS // parts)}
    same(jax.jit(run)(*args), jax.jit(step)(*args))


def taking(experts: list[int], length: int) -> Any:
    """Arguments of a step whose tokens all take the same experts."""
    p, data = params(2), batch(8, length)
    data["x"] = np.abs(data["x"])
    router = np.zeros(p["router"].shape, np.float32)
    router[..., experts] = 1.0
    return {**p, "router": router}, data


@pytest.mark.parametrize("layer", LAYERS[:2])
@pytest.mark.parametrize("experts", [[0, 1], [5, 2]], ids=str)
@pytest.mark.parametrize("loop", ["checkpoint", "unroll", "scan"])
def test_more_rows_than_a_buffer_holds_are_sent_in_further_rounds(
    layer: Any, experts: list[int], loop: str
) -> None:
    step, args = step_of(layer, loop), taking(experts, 25)
    rows = 2 * 25 * 8 // 4
    # Rows that leave the loop over layers have room in one round.
    slots = rows if loop == "scan" else num_slots(rows, 3)
    assert num_slots(rows, 3) < rows
    run, closed = in_blocks(step, args, 4, 3)
    eqns = list(inner_equations(closed))
    factors = [e.invars[0].aval.shape for e in eqns if e.primitive.name in RAGGED_DOTS]
    assert factors and all(4 * slots in shape for shape in factors)
    assert "while" in [eqn.primitive.name for eqn in eqns]
    same(jax.jit(run)(*args), jax.jit(step)(*args))
    same(jax.jit(run)(*args), jax.jit(step)(*args))


@pytest.mark.parametrize(
    ("layer", "count", "parts", "groups", "mesh", "pin"),
    covering(
        [
            (layer, *division, mesh, pin)
            for layer in LAYERS[:2]
            for division, mesh, pin in [
                ((8, 3, 1), {"x": 8}, P("x")),
                ((8, 2, 4), {"x": 2, "y": 4}, P(("x", "y"))),
                ((4, 2, 2), {"x": 4, "y": 2}, P("x")),
                ((8, 2, 4), {"x": 2, "y": 2, "z": 2}, P(("x", "y", "z"))),
            ]
        ],
        [(LAYERS[0], 8, 2, 4, {"x": 2, "y": 4}, P(("x", "y")))],
    ),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_numbers_of_further_rounds_on_eight_devices(
    layer: Any, count: int, parts: int, groups: int, mesh: Any, pin: Any
) -> None:
    step, args = step_of(layer, "checkpoint"), taking([0, 1], 25)
    assert num_slots(2 * 25 * 8 // count, parts) < 2 * 25 * 8 // count
    run, _ = in_blocks(step, args, count, parts, groups)
    same(on_devices(run, mesh, pin)(*args), jax.jit(step)(*args))


def test_a_program_without_gradients_is_differentiated_from_outside() -> None:
    def loss(p: Any, data: Any) -> Any:
        x = data["x"].reshape(-1, WIDTH)
        y = x + LAYERS[0](jax.tree.map(lambda a: a[0], p), x)
        return jnp.mean(jnp.square(y - data["y"].reshape(x.shape)))

    args = taking([0, 1], 25)
    run, closed = in_blocks(loss, args, 4, 3)
    assert group_sizes(closed) == {(3, 1, NUM_EXPERTS // 3)}
    assert "while" not in [eqn.primitive.name for eqn in inner_equations(closed)]
    same(jax.grad(run)(*args), jax.grad(loss)(*args))


def test_rounds_are_planned_as_one() -> None:
    args = params(1), batch(8, 25)
    traced = trace(step_of(LAYERS[0], "checkpoint"), args, {})
    choice = chosen(EXPERTS, {"count": 4, "parts": 3})
    program = apply_passes(traced, [choice]).program
    counts = [
        op.call.trip_count for op in program.ops if op.name == "while" and op.call
    ]
    assert counts and {*counts} == {1}


def test_each_row_is_sent_once_and_comes_back() -> None:
    rng, parts, count, experts, rows = np.random.default_rng(0), 2, 3, 3, 12
    keys = np.sort(rng.integers(0, parts * experts, (count, rows)), axis=1)
    sizes = (keys[:, :, None] == np.arange(parts * experts)).sum(1)
    split = jnp.asarray(sizes.reshape(count, parts, experts).swapaxes(0, 1))
    x = jnp.asarray(rng.normal(size=(count * rows, WIDTH)))
    back, slots = jnp.zeros_like(x), 5
    for start in range(0, rows, slots):
        buffers = Buffers.of(split, rows, slots, start, 1)
        sent = buffers.positions(x)
        there = buffers.to_parts(sent, 0)
        names = buffers.to_parts(buffers.positions(jnp.asarray(keys.reshape(-1))), 0)
        for part in range(parts):
            own = int(buffers.is_own[part].sum())
            expected = np.repeat(np.arange(experts), buffers.sizes[part, 0])
            np.testing.assert_array_equal(names[part, :own], expected + part * experts)
        np.testing.assert_array_equal(buffers.to_blocks(there, 0), sent)
        at = buffers.places(jnp.arange(count * rows))
        back += sent.at[at].get(mode="fill", fill_value=0)
    np.testing.assert_array_equal(back, x)
