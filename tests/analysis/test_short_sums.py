"""Which short reductions are computed inside of the reductions that read them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.lowering import OBSERVED


N = 1024


def _squares(x: Any) -> jax.Array:
    return ((x[:, None] - x[None]) ** 2).sum(-1)


def _largest_stored(fn: Any, num_coordinates: int, hardware: str = "h100:8") -> int:
    x = jax.ShapeDtypeStruct((N, num_coordinates), jnp.float32)
    program = trace(fn, (x,), {}).program
    analysis = ProgramAnalysis.of(program, load_target(hardware))
    stored = zip(analysis.graph.ports, analysis.liveness.is_held, strict=True)
    nodes = [analysis.graph.nodes[port.node] for port, is_it in stored if is_it]
    return max(math.prod(program.values[n.value].shape) for n in nodes)


def _regression(x: Any) -> jax.Array:
    k = jnp.exp(-_squares(x))
    return (k * x[:, 0]).sum(1) / k.sum(1)


INSIDE = {
    "kernel sum": lambda x: jnp.exp(-_squares(x)).sum(1),
    "norms": lambda x: jnp.sqrt(_squares(x)).max(1),
    "nearest": lambda x: jnp.argmin(_squares(x), 1),
    "mean of all": lambda x: jnp.exp(-_squares(x)).mean(),
    "two reductions": _regression,
}

STORED = {
    "sum over columns": lambda x: jnp.exp(-_squares(x)).sum(0),
    "top_k": lambda x: jax.lax.top_k(-_squares(x), 8)[0],
    "softmax": lambda x: (jax.nn.softmax(-_squares(x)) * x[:, 0]).sum(1),
    "product": lambda x: jnp.exp(-_squares(x)) @ x,
}


@pytest.mark.parametrize("name", INSIDE)
def test_pairs_in_front_of_sums_over_rows_are_not_stored(name: str) -> None:
    coordinates = OBSERVED.shortest_sum - 1
    assert _largest_stored(INSIDE[name], coordinates) < N * N
    assert _largest_stored(INSIDE[name], coordinates + 1) == N * N
    assert _largest_stored(INSIDE[name], coordinates, "v5e:2x4") == N * N


@pytest.mark.parametrize("name", STORED)
def test_pairs_that_others_read_are_stored(name: str) -> None:
    assert _largest_stored(STORED[name], 3) == N * N
