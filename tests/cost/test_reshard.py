"""Reshards: which collectives, and that every route ends where it must."""

from __future__ import annotations

import itertools

import pytest

from rhino_jax.cost.collectives import collective_s, wire_bytes
from rhino_jax.cost.reshard import reshard_route, reshard_steps
from rhino_jax.hardware.lowering import AS_WRITTEN, LoweringPolicy
from rhino_jax.hardware.mesh import MeshAxis
from rhino_jax.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
)
from rhino_jax.model.strategies import all_specs


SIZES = (2, 4)
BY_AXIS = LoweringPolicy(gathers_by_axis=True)


@pytest.mark.parametrize(
    ("src", "dst", "kinds"),
    [
        (((), ()), ((0,), (1,)), []),
        (((0,), ()), ((), ()), [ALL_GATHER]),
        (((0,), ()), ((), (0,)), [ALL_TO_ALL]),
        (((0, 1), ()), ((0,), ()), [ALL_GATHER]),
        (((0, 1), ()), ((0,), (1,)), [ALL_TO_ALL]),
        (((0, 1), ()), ((1, 0), ()), [PERMUTE]),
        (((0,), (1,)), ((), ()), [ALL_GATHER, ALL_GATHER]),
        (((0,), ()), ((), (1,)), [ALL_GATHER]),
    ],
)
def test_known_changes(src: tuple, dst: tuple, kinds: list[str]) -> None:
    assert [s.kind for s in reshard_steps(src, dst, 1024, SIZES)] == kinds


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2), (2, 2, 2)])
def test_every_route_ends_at_its_goal_and_moves_at_most_a_gather(
    sizes: tuple[int, ...],
) -> None:
    specs = all_specs((16, 16, 16), sizes)
    devices = 1
    for n in sizes:
        devices *= n
    for src, dst in itertools.product(specs[::3], specs):
        route = reshard_route(src, dst, sizes)
        assert (route[-1] if route else src) == dst
        moved = sum(
            wire_bytes(s.kind, s.local_bytes, 10**9)
            for s in reshard_steps(src, dst, 4096, sizes)
        )
        assert moved <= 4096 * (1 + len(sizes))


def test_axes_are_added_only_behind_those_that_are_wanted_before_them() -> None:
    """A dim sharded by axis 1 cannot take axis 2 of (0, 2): 0 must come first."""
    src, dst, sizes = ((1,),), ((0, 2),), (2, 2, 2)
    (step,) = reshard_steps(src, dst, 64, sizes)
    assert (step.kind, step.axes, step.local_bytes) == (ALL_GATHER, (1,), 64)
    assert reshard_route(src, dst, sizes) == (((),), dst)


def test_an_all_to_all_moves_less_than_a_gather() -> None:
    src, dst = ((0,), ()), ((), (0,))
    (swap,) = reshard_steps(src, dst, 4096, SIZES)
    (gather,) = reshard_steps(src, ((), ()), 4096, SIZES)
    assert wire_bytes(swap.kind, swap.local_bytes, 2) < wire_bytes(
        gather.kind, gather.local_bytes, 2
    )


@pytest.mark.parametrize("topology", ["ring", "line", "switch", "barrier"])
@pytest.mark.parametrize(
    "kind", [ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER]
)
def test_time_is_monotone_in_bytes_and_devices(kind: str, topology: str) -> None:
    def seconds(size: int, local_bytes: float) -> float:
        axis = MeshAxis("x", size, 1e-6, 1e9, topology)
        return collective_s(kind, local_bytes, [axis])

    for size in (2, 4, 8, 16):
        for local_bytes in (0.0, 1e3, 1e6):
            assert seconds(size, local_bytes) < seconds(size, local_bytes + 1e5)
            assert seconds(size, local_bytes) <= seconds(2 * size, local_bytes)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    axes = [MeshAxis("x", 4, 1e-6, 1e9, "ring"), MeshAxis("y", 8, 2e-6, 1e8, "line")]
    parts = collective_s(REDUCE_SCATTER, 1e6, axes) + collective_s(
        ALL_GATHER, 1e6, axes
    )
    assert collective_s(ALL_REDUCE, 1e6, axes) == pytest.approx(parts)
    assert wire_bytes(ALL_REDUCE, 1e6, 32) == pytest.approx(
        wire_bytes(REDUCE_SCATTER, 1e6, 32) + wire_bytes(ALL_GATHER, 1e6, 32)
    )


@pytest.mark.parametrize("kind", [ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER])
def test_threads_meet_once_whatever_they_move(kind: str) -> None:
    axes = [
        MeshAxis("x", 2, 3e-6, 1e9, "barrier"),
        MeshAxis("y", 4, 3e-6, 1e9, "barrier"),
    ]
    assert collective_s(kind, 0.0, axes) == pytest.approx(8 * 3e-6)
    assert collective_s(kind, 0.0, axes[:1]) == pytest.approx(2 * 3e-6)
    copied_s = collective_s(kind, 1e6, axes[:1]) - 2 * 3e-6
    assert copied_s == pytest.approx(wire_bytes(kind, 1e6, 2) / 1e9)


def test_slow_links_gather_first_and_stops_are_said() -> None:
    src, dst = ((1,), (0,)), ((), ())
    steps = reshard_steps(src, dst, 4096, SIZES)
    assert [s.axes for s in steps] == [(0,), (1,)]
    assert steps[0].local_bytes < steps[1].local_bytes
    assert reshard_route(src, dst, SIZES) == (((1,), ()), dst)


def test_gathers_by_axis_take_the_minor_axis_first() -> None:
    src, dst = ((0, 1), ()), ((), ())
    (whole,) = reshard_steps(src, dst, 4096, SIZES)
    assert whole.axes == (0, 1)
    steps = reshard_steps(src, dst, 4096, SIZES, BY_AXIS)
    assert [s.axes for s in steps] == [(1,), (0,)]
    assert reshard_route(src, dst, SIZES, BY_AXIS) == (((0,), ()), dst)
    # Told only the end, such compilers make an all-reduce of it.
    (reduce,) = reshard_steps(src, dst, 4096, SIZES, BY_AXIS.without_waypoints())
    assert (reduce.kind, reduce.local_bytes) == (ALL_REDUCE, whole.local_bytes)


def test_told_only_the_end_the_last_dim_is_gathered_first() -> None:
    src, dst = ((0,), (1,)), ((), ())
    assert [s.axes for s in reshard_steps(src, dst, 4096, SIZES)] == [(0,), (1,)]
    steps = reshard_steps(src, dst, 4096, SIZES, AS_WRITTEN.without_waypoints())
    assert [s.axes for s in steps] == [(1,), (0,)]
    (step,) = reshard_steps(src, dst, 4096, SIZES, BY_AXIS.without_waypoints())
    assert (step.kind, step.axes, step.local_bytes) == (ALL_REDUCE, (0, 1), 4096)


def test_a_cut_after_a_gather_is_said_as_a_stop() -> None:
    """XLA:CPU of jax 0.10.2 otherwise permutes and gathers a part of an axis."""
    src, dst = ((0,), (), (1,), ()), ((), (), (0,), ())
    route = reshard_route(src, dst, (2, 4))
    assert route == (((), (), (1,), ()), ((), (), (), ()), dst)
    kinds = [s.kind for s in reshard_steps(src, dst, 1024, (2, 4))]
    assert kinds == ["all-gather"] * 2
