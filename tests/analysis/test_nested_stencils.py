"""Stencils of slices and pads: where they are kernels of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.analysis.fusing import Fusing
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.liveness import analyse
from rhino_jax.frontend.trace import trace


def _three_points(u: Any) -> Any:
    q = jnp.pad(u, ((1, 1), (0, 0)))
    return u + 0.1 * (q[2:] + q[:-2] - 2 * u)


def _difference(u: Any) -> Any:
    return jnp.pad(u[1:] - u[:-1], ((0, 1), (0, 0)))


def _coarser(u: Any) -> Any:
    r = _three_points(u)
    return r[::2] + r[1::2]


@pytest.mark.parametrize(
    ("body", "times", "num_kernels"),
    [
        (_three_points, 1, 1),
        (_three_points, 3, 3),
        (_difference, 2, 1),
        (_difference, 4, 2),
        (_coarser, 1, 1),
    ],
)
def test_a_stencil_of_a_stencil_is_a_kernel_of_its_own(
    body: Callable[[Any], Any], times: int, num_kernels: int
) -> None:
    """As XLA:GPU compiles them (H100, jax 0.10.2)."""

    def fn(u: Any) -> Any:
        for _ in range(times):
            u = body(u)
        return u

    program = trace(fn, (jax.ShapeDtypeStruct((64, 32), "float32"),), {}).program
    graph = inline_regions(program, fuses_rotations=True)
    assert sum(analyse(graph, Fusing()).kernels.launches) == num_kernels
