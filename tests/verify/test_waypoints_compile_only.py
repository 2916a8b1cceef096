"""What XLA makes of partial sums and gathers, told every stop or only the end."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from rhino_jax.cost.combine import combine_route, combine_steps
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.layout import lay_out
from rhino_jax.verify.compile import compile_lowered
from rhino_jax.verify.hlo.module import parse_module
from tests.verify.extras import mesh_of_target
from tests.verify.hlo.collectives_of import read_collectives


pytestmark = pytest.mark.compile_only

ROWS, COLUMNS = 2048, 8192
WHOLE = ((), ())


def wire_share(hardware: str, axes: dict[str, int], waypoints: list[P]) -> float:
    """Bytes on the wire over those of a gradient whose batch is cut by all axes."""
    mesh = mesh_of_target(hardware, axes)
    batch = NamedSharding(mesh, P(tuple(axes)))

    def gradient(x: Any, y: Any) -> Any:
        z = jnp.einsum("bd,bf->df", x, y)
        for waypoint in waypoints:
            z = jax.lax.with_sharding_constraint(z, NamedSharding(mesh, waypoint))
        return z

    x, y = (
        jax.ShapeDtypeStruct((4096, n), jnp.bfloat16, sharding=batch)
        for n in (ROWS, COLUMNS)
    )
    out = NamedSharding(mesh, waypoints[-1])
    lowered = jax.jit(gradient, out_shardings=out).lower(x, y)
    text = compile_lowered(lowered, mesh=mesh).hlo_text
    found = read_collectives(parse_module(text), tuple(axes.items()))
    return sum(c.bytes for c in found) / (2 * ROWS * COLUMNS)


@pytest.mark.parametrize(
    ("hardware", "axes", "done"),
    [
        ("h100:2x8", {"a": 2, "b": 8}, ((0,), (1,))),
        ("v5e:4x4", {"a": 4, "b": 4}, ((0,), (1,))),
        ("v5p:4x4x4", {"a": 16, "b": 4}, ((0, 1), ())),
    ],
)
def test_told_every_stop_partial_sums_are_scattered(
    hardware: str, axes: dict[str, int], done: tuple
) -> None:
    laid = lay_out(load_target(hardware), tuple(axes.items()))
    route = combine_route(WHOLE, done, laid.lowering)
    waypoints = [
        P(*(tuple("ab"[a] for a in dim) or None for dim in spec))
        for spec in (*route, done)
    ]
    kinds = {s.kind for s in combine_steps(WHOLE, done, (0, 1), 1.0, laid)}
    assert kinds == {"reduce-scatter"}
    # Each device's share of the ring is all but one part; padding adds some.
    assert wire_share(hardware, axes, waypoints) < 1.2
    # If this falls, XLA has learnt it, and the stops are no longer needed.
    assert wire_share(hardware, axes, waypoints[-1:]) > 1.8


def test_told_where_they_are_made_convolutions_are_not_looped() -> None:
    axes = {"a": 16}
    mesh = mesh_of_target("v5e:4x4", axes)
    batch, filters = NamedSharding(mesh, P("a")), P(None, None, "a")

    def loops(waypoints: list[P]) -> int:
        def gradient(x: Any, y: Any) -> Any:
            z = jax.lax.conv_general_dilated(
                x, y, (1, 1), "VALID", dimension_numbers=("CHWN", "IHWO", "HWNC")
            )
            for waypoint in waypoints:
                z = jax.lax.with_sharding_constraint(z, NamedSharding(mesh, waypoint))
            return z

        x, y = (
            jax.ShapeDtypeStruct((1024, 28, 28, n), jnp.bfloat16, sharding=batch)
            for n in (256, 512)
        )
        lowered = jax.jit(gradient).lower(x, y)
        return compile_lowered(lowered, mesh=mesh).hlo_text.count(" while(")

    assert loops([P(), filters]) == 0
    # If this is 0, XLA has learnt it, and the first stop is no longer needed.
    assert loops([filters]) > 0
