"""Tokens sorted by expert in blocks, with experts in parts: the same numbers, on one
device and on eight."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.regions import inner_equations
from rhino_jax.frontend.rules.dot import RAGGED_DOTS
from rhino_jax.frontend.trace import trace
from rhino_jax.passes.experts.emit import sorted_tokens
from tests.cases import covering
from tests.passes.experts.mixtures import (
    CHOICES,
    EXPERTS,
    LAYERS,
    balanced,
    batch,
    in_blocks,
    multiplied,
    on_devices,
    params,
    routed,
    step_of,
)
from tests.passes.experts.random_mixtures import drawn


def same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def group_sizes(closed: Any) -> set[tuple[int, ...]]:
    """Shapes of the group sizes of all grouped matmuls."""
    return {
        eqn.invars[2].aval.shape
        for eqn in inner_equations(closed)
        if eqn.primitive.name in RAGGED_DOTS
    }


LOOPS = "unroll", "scan", "checkpoint"
DIVISIONS = [(4, 1), (8, 2), (1, 3), (2, 6)]
ALL = [
    (layer, loop, *division)
    for layer in (*LAYERS, balanced)
    for loop in LOOPS
    for division in DIVISIONS
]


@pytest.mark.parametrize(
    ("layer", "loop", "count", "parts"),
    covering(ALL, ALL[::11]),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_numbers_are_those_of_all_tokens_sorted_together(
    layer: Any, loop: str, count: int, parts: int
) -> None:
    step, args = step_of(layer, loop), (params(2), batch(8, 3))
    run, closed = in_blocks(step, args, count, parts)
    lead = (count,) if parts == 1 else (parts, 1)
    assert group_sizes(closed) == {(*lead, EXPERTS // parts)}
    same(jax.jit(run)(*args), jax.jit(step)(*args))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("chosen", [[0, 1], [5, 2]], ids=str)
def test_experts_without_tokens_and_with_all(parts: int, chosen: list[int]) -> None:
    step, (p, data) = step_of(LAYERS[0], "unroll"), (params(2), batch(8, 3))
    data["x"] = np.abs(data["x"])
    router = np.zeros(p["router"].shape, np.float32)
    router[..., chosen] = 1.0
    args = {**p, "router": router}, data
    run, _ = in_blocks(step, args, 4, parts)
    same(jax.jit(run)(*args), jax.jit(step)(*args))


@pytest.mark.parametrize(
    ("layer", "loop", "count", "parts", "mesh", "pin"),
    covering(
        [
            (layer, loop, *division, mesh, pin)
            for layer in LAYERS[:2]
            for loop in LOOPS[:2]
            for division, mesh, pin in [
                ((8, 1), {"x": 8}, P("x")),
                ((4, 1), {"x": 4, "y": 2}, P("x")),
                ((4, 2), {"x": 4, "y": 2}, P(("x", "y"))),
                ((2, 2), {"x": 2, "y": 2, "z": 2}, P(("x", "y"))),
            ]
        ],
        [(LAYERS[0], "scan", 4, 2, {"x": 4, "y": 2}, P(("x", "y")))],
    ),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_numbers_on_eight_devices(
    layer: Any, loop: str, count: int, parts: int, mesh: Any, pin: Any
) -> None:
    step, args = step_of(layer, loop), (params(2), batch(8, 3))
    run, _ = in_blocks(step, args, count, parts)
    same(on_devices(run, mesh, pin)(*args), jax.jit(step)(*args))


def test_what_reads_the_order_of_all_tokens_sorts_them_together() -> None:
    def layer(p: Any, x: Any) -> Any:
        _, experts = routed(p, x)
        order = jnp.argsort(experts.reshape(-1))
        sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
        y = multiplied(p, x[order // CHOICES], sizes)
        y = lax.cumsum(y, axis=0)
        return jnp.zeros_like(x).at[order // CHOICES].add(y)

    step, args = step_of(layer, "unroll"), (params(2), batch(8, 3))
    traced = trace(step, args, {})
    assert sorted_tokens(traced.closed_jaxpr, traced.program) is None
    with pytest.raises(MicrobatchError, match="sorts no tokens"):
        in_blocks(step, args, 4, 1)


@pytest.mark.parametrize(("count", "parts"), [(3, 1), (4, 4)])
def test_divisions_that_leave_a_rest_are_refused(count: int, parts: int) -> None:
    with pytest.raises(MicrobatchError, match="divided so"):
        in_blocks(step_of(LAYERS[0], "unroll"), (params(2), batch(8, 3)), count, parts)


@pytest.mark.parametrize("seed", covering(range(24), range(3)))
def test_random_mixtures(seed: int) -> None:
    step, args, divisions = drawn(seed)
    count, parts = divisions[seed % len(divisions)]
    run, closed = in_blocks(step, args, count, parts)
    lead = (count,) if parts == 1 else (parts, 1)
    assert {sizes[:-1] for sizes in group_sizes(closed)} == {lead}
    same(jax.jit(run)(*args), jax.jit(step)(*args))
