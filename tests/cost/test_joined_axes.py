"""Collectives over several axes cost what the devices that these join say."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from rhino_jax.cost.collectives import collective_s
from rhino_jax.hardware.files import hardware_names, load_target
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.hardware.target import Target
from rhino_jax.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
)


KINDS = (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER)
BYTES = (0.0, 1e3, 1e6, 256e6)


def _mesh(hardware: str, *sizes: int) -> LaidMesh:
    return lay_out(load_target(hardware), list(zip("abcdefgh", sizes, strict=False)))


def _seconds(mesh: LaidMesh, axes: tuple[int, ...], kind: str, size: float) -> float:
    return collective_s(kind, size, mesh.over(axes))


def _one_after_another_s(
    mesh: LaidMesh, axes: tuple[int, ...], kind: str, size: float
) -> float:
    return collective_s(kind, size, [mesh.axes[a] for a in axes])


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    for n in range(1, count + 1):
        yield from itertools.combinations(range(count), n)


@pytest.mark.parametrize(
    ("hardware", "sizes", "axes", "joined", "axis"),
    [
        # Within a host, over whole hosts, over parts of hosts.
        ("h100:8x8", (8, 2, 4), (1, 2), (8, 8), 1),
        ("h100:8x8", (2, 4, 8), (1, 2), (2, 32), 1),
        ("h100:8x8", (2, 4, 8), (0, 1, 2), (64,), 0),
        ("h100:8x8", (4, 4, 4), (1, 2), (4, 16), 1),
        ("b200", (2, 6, 12), (1, 2), (2, 72), 1),
        ("cpu", (2, 2, 4), (0, 1, 2), (16,), 0),
        # GPUs of an uneven share of hosts.
        ("h100", (8, 3), (0, 1), (24,), 0),
        # A side of a torus, all of it, cubes, and pods.
        ("v5e:16x16", (16, 4, 4), (1, 2), (16, 16), 1),
        ("v5e:16x16", (16, 16), (0, 1), (256,), 0),
        ("v5e:16x16", (4, 4, 4, 4), (0, 1, 2, 3), (256,), 0),
        ("v5e:2x16x16", (2, 16, 16), (1, 2), (2, 256), 1),
        ("v5e:2x16x16", (2, 16, 16), (0, 1, 2), (512,), 0),
        ("v5p:4x4x4", (4, 4, 4), (1, 2), (4, 16), 1),
        ("v5p:4x4x4", (2, 2, 4, 4), (0, 1), (4, 4, 4), 0),
        ("tpu7x:4x4x4", (64, 2), (0, 1), (128,), 0),
        # A line of few links within a slice, as slow as what joins slices.
        ("tpu7x", (8, 16, 16, 16), (0, 1, 2, 3), (32768,), 0),
        # An axis of one device between them is no axis.
        ("h100:8x8", (2, 4, 1, 8), (1, 3), (2, 32), 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_axes_that_fill_a_link_cost_as_one_axis(
    hardware: str,
    sizes: tuple[int, ...],
    axes: tuple[int, ...],
    joined: tuple[int, ...],
    axis: int,
    kind: str,
) -> None:
    several, one = _mesh(hardware, *sizes), _mesh(hardware, *joined)
    for num_bytes in BYTES:
        assert _seconds(several, axes, kind, num_bytes) == pytest.approx(
            _seconds(one, (axis,), kind, num_bytes)
        )


SIZES = st.lists(st.sampled_from([2, 3, 4, 8, 16]), min_size=2, max_size=4)


@settings(deadline=None, max_examples=60)
@given(hardware=st.sampled_from(hardware_names()), sizes=SIZES)
def test_the_whole_mesh_costs_as_one_axis(hardware: str, sizes: list[int]) -> None:
    """All axes together are all devices, however they are cut."""
    several, one = _mesh(hardware, *sizes), _mesh(hardware, math.prod(sizes))
    every = tuple(range(len(sizes)))
    if every not in several.joins:  # unevenly over slices
        assert any(n % 3 == 0 for n in sizes) and load_target(hardware).torus
        return
    for kind, num_bytes in itertools.product(KINDS, BYTES):
        assert _seconds(several, every, kind, num_bytes) == pytest.approx(
            _seconds(one, (0,), kind, num_bytes)
        ), kind


@settings(deadline=None, max_examples=60)
@given(
    hardware=st.sampled_from([n for n in hardware_names() if not load_target(n).torus]),
    sizes=SIZES,
)
def test_neighbours_on_switches_cost_as_one_axis(
    hardware: str, sizes: list[int]
) -> None:
    mesh = _mesh(hardware, *sizes)
    for start, stop in itertools.combinations(range(len(sizes) + 1), 2):
        joined = [*sizes[:start], math.prod(sizes[start:stop]), *sizes[stop:]]
        one = _mesh(hardware, *joined)
        for kind, num_bytes in itertools.product(KINDS, BYTES):
            assert _seconds(mesh, tuple(range(start, stop)), kind, num_bytes) == (
                pytest.approx(_seconds(one, (start,), kind, num_bytes))
            ), kind


@settings(deadline=None, max_examples=150)
@given(hardware=st.sampled_from(hardware_names()), sizes=SIZES)
def test_one_collective_is_never_slower_than_one_after_another(
    hardware: str, sizes: list[int]
) -> None:
    mesh = _mesh(hardware, *sizes)
    for axes in _subsets(len(sizes)):
        for kind, num_bytes in itertools.product(KINDS, BYTES):
            together_s = _seconds(mesh, axes, kind, num_bytes)
            assert together_s <= _one_after_another_s(mesh, axes, kind, num_bytes) * (
                1 + 1e-9
            ), (kind, axes, num_bytes)


@settings(deadline=None, max_examples=60)
@given(hardware=st.sampled_from(hardware_names()), sizes=SIZES)
def test_more_bytes_never_cost_less(hardware: str, sizes: list[int]) -> None:
    mesh = _mesh(hardware, *sizes)
    for axes, kind in itertools.product(_subsets(len(sizes)), KINDS):
        times = [_seconds(mesh, axes, kind, b) for b in (0, 1e2, 1e4, 1e6, 1e8)]
        assert times == sorted(times) and len(set(times)) == len(times), (kind, axes)
        # Linear, as the search's tables take it to be.
        assert times[3] - times[0] == pytest.approx((times[4] - times[0]) / 100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes",
    [
        [(64 // n, n // 2, 2) for n in (4, 8, 16, 32)],  # a host, then several
        [(8, n, 8 // n) for n in (2, 4)],
    ],
)
def test_more_hosts_never_cost_less(sizes: list[tuple[int, ...]], kind: str) -> None:
    for num_bytes in BYTES:
        times = [_seconds(_mesh("h100:8x8", *s), (1, 2), kind, num_bytes)
                 for s in sizes]  # fmt: skip
        assert times == sorted(times)


def test_an_axis_left_out_stays_between() -> None:
    """One GPU of each of 2 hosts times the 8 of a host; 8 hosts, one GPU of each."""
    mesh = _mesh("h100:8x8", 2, 4, 8)
    (hosts,) = mesh.over((0, 1))
    assert (hosts.size, hosts.bytes_per_s, hosts.alpha_s) == (8, 5e10, 1e-5)
    (far,) = mesh.over((0, 2))
    # Eight send to the other host at once, each through its own adapter.
    assert (far.size, far.bytes_per_s) == (16, 4e11)
    assert [p.size for p in far.parts] == [8, 2]
    # Every fourth device of a side, and every device of the other side.
    (strided,) = _mesh("v5e:16x16", 4, 4, 16).over((0, 2))
    assert sorted(x.bytes_per_s for x in strided.parts[0].dims) == [11.25e9, 90e9]
    # Pairs of neighbours, eight apart: one side, not whole.
    (apart,) = _mesh("v5e:16x16", 2, 4, 2, 16).over((0, 2))
    assert (apart.size, apart.bytes_per_s, apart.topology) == (
        4,
        2 * 4.5e10 / 8,
        "line",
    )


def test_sides_of_a_torus_are_used_at_once() -> None:
    (both,) = _mesh("v5e:16x16", 16, 16).over((0, 1))
    assert both.bytes_per_s == 4 * 4.5e10
    # Half of all is exchanged over the 32 links between two halves.
    exchanged_s = collective_s(ALL_TO_ALL, 1e9, [both])
    assert exchanged_s == pytest.approx(128 * 0.5e9 / (32 * 4.5e10), rel=1e-2)


def test_an_exchange_between_hosts_takes_each_devices_own_adapter() -> None:
    (axis,) = _mesh("h100:2x8", 16).axes
    assert collective_s(ALL_TO_ALL, 1e9, [axis]) == pytest.approx(
        0.5e9 / 5e10, rel=1e-2
    )
    assert collective_s(PERMUTE, 1e9, [axis]) == pytest.approx(1e9 / 5e10, rel=1e-2)


def test_a_small_message_does_not_go_round_all_slices() -> None:
    """Over each kind of link by itself, where a ring over all has more steps."""
    (axis,) = _mesh("v5e:2x16x16", 512).axes
    assert collective_s(ALL_GATHER, 0.0, [axis]) == pytest.approx(30e-6 + 50e-6)


def test_stated_links_are_taken_one_after_another() -> None:
    target = Target.pure_communication({"a": (0.0, 1.0), "b": (0.0, 2.0)})
    mesh = lay_out(target, [("a", 2), ("b", 4)])
    assert mesh.over((0, 1)) == mesh.axes
    assert mesh.over(()) == ()


def test_axes_trade_places_only_if_alike_with_all_others() -> None:
    assert _mesh("v5e:4x4", 4, 4).kinds == (0, 0)
    assert _mesh("h100:1x8", 2, 2, 2).kinds == (0, 0, 0)
    # Two hosts: the last two are within one.
    assert _mesh("h100:2x4", 2, 2, 2).kinds == (0, 1, 1)
    # The first and the last are one side together, the second and the last none.
    assert _mesh("v5e:4x4", 2, 2, 4).kinds == (0, 1, 2)


def test_meshes_that_differ_only_in_names_have_one_signature() -> None:
    assert _mesh("h100:1x8", 2, 4).signature == _mesh("h100:1x8", 4, 2).signature
    assert _mesh("h100:2x4", 2, 4).signature != _mesh("h100:2x4", 4, 2).signature
    padded = _mesh("v5e:16x16", 16, 16, 1)
    assert _mesh("v5e:16x16", 16, 16).signature == padded.signature
