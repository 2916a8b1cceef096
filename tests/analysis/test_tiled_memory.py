"""Tiles in the prices of a plan: its traffic and its peak."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.analysis.dim_classes import dims_off_lanes, find_dim_classes
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.plan.plan import PlanData


# Starting a kernel takes no time here: these are small.
TILED = load_target("v5e:2x4").replace(launch_s=0.0)
PLAIN = TILED.replace(tile=())


def planned(shape: tuple[int, ...], hardware: Any, axis: int) -> PlanData:
    """The plan of an elementwise step whose only dim that divides is the first."""

    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * 2 + 1

    x = jax.ShapeDtypeStruct(shape, "float32")
    return rhino.plan(step, x, mesh={"x": axis}, hardware=hardware, progress=False)


@pytest.mark.parametrize(
    ("shape", "times"),
    [
        ((64, 15, 15, 36, 20), 128 / 36),
        ((24, 15, 130), 16 / 15 * 256 / 130),
        # The batch may be the rows.
        ((64, 15, 1023), 1024 / 1023),
        # One row on each device needs no more rows than it is.
        ((8, 1023), 1024 / 1023),
    ],
)
def test_padding_is_moved_and_held(shape: tuple[int, ...], times: float) -> None:
    tiled, plain = (planned(shape, target, 8) for target in (TILED, PLAIN))
    assert tiled.inputs[0].spec == plain.inputs[0].spec
    seconds = [p.predicted.compute_s for p in (tiled, plain)]
    assert seconds[0] / seconds[1] == pytest.approx(times)
    peaks = [p.predicted.peak_bytes for p in (tiled, plain)]
    assert peaks[0] / peaks[1] == pytest.approx(times)


def norm(x: jax.Array) -> jax.Array:
    """GroupNorm of x [N, H, W, C]: 32 groups."""
    wide = x.reshape(*x.shape[:3], 32, -1)
    mean = wide.mean((1, 2, 4), keepdims=True)
    wide = (wide - mean) * jnp.square(wide - mean).mean((1, 2, 4), keepdims=True)
    return jnp.sin(wide.reshape(x.shape))


def test_only_the_last_of_merged_dims_lies_on_lanes() -> None:
    x = jax.ShapeDtypeStruct((8, 16, 16, 256), "float32")
    graph = inline_regions(trace(norm, (x,), {}).program)
    off = dims_off_lanes(graph, find_dim_classes(graph))
    by_shape: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for value in graph.held:
        shape = graph.program.values[value].shape
        by_shape.setdefault(shape, set()).add(off.get(value, ()))
    # The groups, not the merged channels nor what a group holds.
    assert by_shape[8, 16, 16, 32, 8] == {(3,)}
    assert by_shape[8, 16, 16, 256] == {()}
    assert by_shape[8, 32] == {(1,)}


def test_merged_positions_of_as_many_as_rows_may_lie_on_lanes() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        image = jnp.sin(x)
        y = jax.lax.conv_general_dilated(
            image, w, (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = y.reshape(8, 16, 32)
        return jnp.sin(jnp.einsum("bqc,bkc->bqk", y, y)[:, None])

    shapes = (8, 16, 16, 3), (4, 4, 3, 32)
    args = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    graph = inline_regions(trace(step, args, {}).program)
    off = dims_off_lanes(graph, find_dim_classes(graph))
    values = graph.program.values
    assert all(
        off.get(v, ()) == () for v in graph.held if values[v].shape[-2:] == (16, 16)
    )


def test_what_no_reshape_merges_may_lie_on_lanes() -> None:
    def step(x: jax.Array) -> jax.Array:
        return (jnp.tanh(x) @ x.T)[None]

    x = jax.ShapeDtypeStruct((64, 32), "float32")
    graph = inline_regions(trace(step, (x,), {}).program)
    assert dims_off_lanes(graph, find_dim_classes(graph)) == {}


def test_padding_is_not_sent() -> None:
    """A reshard sends what the value holds: its wire bytes and time stay."""

    def step(x: jax.Array) -> jax.Array:
        return x.sum((1, 2))

    x = jax.ShapeDtypeStruct((15, 8, 8), "float32")
    pins = {"x": jax.sharding.PartitionSpec(None, "x")}
    plans = [
        rhino.plan(step, x, mesh={"x": 8}, hardware=t, pins=pins, progress=False)
        for t in (TILED, PLAIN)
    ]
    sent = [[(c.kind, c.bytes, c.seconds) for c in p.collectives] for p in plans]
    assert sent[0] == sent[1] and sent[0]
