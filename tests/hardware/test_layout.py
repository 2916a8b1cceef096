"""Which link each mesh axis lies on, by hand-computed cases and by laws."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from rhino_jax.errors import HardwareError, MeshError
from rhino_jax.hardware.files import hardware_names, load_target
from rhino_jax.hardware.layout import lay_out, mesh_axis_names, mesh_shapes
from rhino_jax.hardware.mesh import MeshAxis
from rhino_jax.hardware.target import Device, Target, Tier


NAMES = "xyzw"


def _axes(hardware: str | Target, *sizes: int) -> tuple[MeshAxis, ...]:
    target = load_target(hardware)
    return lay_out(target, list(zip(NAMES, sizes, strict=False))).axes


def _links(hardware: str, *sizes: int) -> list[tuple[str, str, float]]:
    axes = _axes(hardware, *sizes)
    return [(a.tier, a.topology, round(a.bytes_per_s / 1e9, 3)) for a in axes]


def _ring_s(axis: MeshAxis, total_bytes: float) -> float:
    n = axis.size
    return axis.alpha_s * (n - 1) + (n - 1) / n * total_bytes / axis.bytes_per_s


@pytest.mark.parametrize(
    ("hardware", "sizes", "expected"),
    [
        # One host, the host's eight, two hosts, hosts only, half a host.
        ("h100", (8,), [("nvlink", "switch", 450)]),
        ("h100", (2, 4), [("nvlink", "switch", 450)] * 2),
        ("h100", (16,), [("network", "switch", 400)]),
        ("a100", (16,), [("network", "switch", 200)]),
        ("h100", (8, 8), [("network", "switch", 50), ("nvlink", "switch", 450)]),
        ("h100", (16, 4), [("network", "switch", 100), ("nvlink", "switch", 450)]),
        ("h100", (4, 16), [("network", "switch", 50), ("network", "switch", 400)]),
        ("h100:2x4", (8,), [("network", "switch", 200)]),
        ("b200:1x72", (72,), [("nvlink", "switch", 900)]),
        # 12 GPUs over 2 hosts are 6 a host on average; so are 3 x 4.
        ("h100", (12,), [("network", "switch", 300)]),
        ("h100", (3, 4), [("network", "switch", 75), ("nvlink", "switch", 450)]),
        # Threes do not fit hosts of eight: some group lies over two.
        ("h100", (8, 3), [("network", "switch", 100), ("network", "switch", 75)]),
        ("cpu", (8,), [("shared_memory", "barrier", 0.823)]),
        # Rings of 16, both at once, and their product.
        ("v5e", (16, 16), [("ici", "ring", 90)] * 2),
        ("v5e", (256,), [("ici", "ring", 180)]),
        # No wrap-around below 16: a line over one dim, or over two at once.
        ("v5e", (8,), [("ici", "line", 90)]),
        ("v5e", (2, 4), [("ici", "line", 45)] * 2),
        ("v5e", (16,), [("ici", "line", 90)]),
        ("v5e:8x16", (8, 16), [("ici", "line", 45), ("ici", "ring", 90)]),
        # Parts of dims are lines; every 8th device of a dim shares its links.
        ("v5e", (32, 8), [("ici", "line", 95.625), ("ici", "line", 45)]),
        ("v5e", (2, 8, 16), [("ici", "line", 5.625), ("ici", "line", 45),
                             ("ici", "ring", 90)]),
        ("v5e:8x8", (16, 4), [("ici", "line", 56.25), ("ici", "line", 45)]),
        # Pods over the data-center network.
        ("v5e", (2, 16, 16), [("dcn", "switch", 3.125), ("ici", "ring", 90),
                              ("ici", "ring", 90)]),
        ("v5e", (2, 256), [("dcn", "switch", 3.125), ("ici", "ring", 180)]),
        ("v5e", (32, 16), [("dcn", "line", 50), ("ici", "ring", 90)]),
        # Whole cubes wrap around, less does not.
        ("v5p", (64,), [("ici", "ring", 540)]),
        ("v5p", (16, 4), [("ici", "ring", 360), ("ici", "ring", 180)]),
        ("v5p", (4, 4, 4), [("ici", "ring", 180)] * 3),
        # The minor axis takes two whole dims, as in JAX.
        ("v5p", (2, 2, 4), [("ici", "line", 45), ("ici", "line", 90),
                            ("ici", "line", 180)]),
        ("v5p", (192,), [("ici", "ring", 540)]),
        ("v5p:4x4x4", (8,), [("ici", "line", 270)]),
        ("v4", (4, 4, 4), [("ici", "ring", 90)] * 3),
        # Two devices a chip, which share the chip's links.
        ("tpu7x", (2,), [("die", "switch", 540)]),
        ("tpu7x", (64, 2), [("ici", "ring", 270), ("die", "switch", 540)]),
        ("tpu7x", (128,), [("ici", "line", 540)]),
        # Sizes that fit no dim still get a line.
        ("v5e", (7,), [("ici", "line", 45)]),
        ("v5e:4x4", (5, 3), [("ici", "line", 45)] * 2),
        ("v5e", (1, 1), [("ici", "switch", 45)] * 2),
    ],
)  # fmt: skip
def test_links(
    hardware: str, sizes: tuple[int, ...], expected: list[tuple[str, str, float]]
) -> None:
    assert _links(hardware, *sizes) == expected


def test_latency_is_that_of_all_steps_of_a_ring() -> None:
    (axis,) = _axes("h100", 16)
    # Fourteen steps inside the two hosts, one between them.
    assert axis.alpha_s * 15 == pytest.approx(14 * 3e-6 + 10e-6)
    (axis,) = _axes("v5e", 256)
    # Fifteen hops along each dim.
    assert axis.alpha_s * 255 == pytest.approx(30e-6)


def test_names_sizes_and_order_are_kept() -> None:
    mesh = lay_out(load_target("v5e"), [("data", 2), ("model", 4)])
    assert mesh.names == ("data", "model")
    assert mesh.sizes == (2, 4)
    assert lay_out(load_target("v5e"), []).axes == ()


def test_tiers_of_ones_own() -> None:
    device = Device(
        peak_flops_per_s=(("float32", 1.0),), hbm_bytes=1, hbm_bytes_per_s=1.0
    )
    tiers = (
        Tier(name="board", size=4, alpha_s=1e-6, bytes_per_s=100.0),
        Tier(name="rack", size=16, alpha_s=1e-5, bytes_per_s=10.0),
        Tier(name="hall", alpha_s=1e-4, bytes_per_s=1.0),
    )
    target = Target(name="own", device=device, tiers=tiers)
    mesh = lay_out(target, [("x", 2), ("y", 4), ("z", 4)])
    assert [(a.tier, a.bytes_per_s) for a in mesh.axes] == [
        ("hall", 1.0),
        ("rack", 10.0),
        ("board", 100.0),
    ]
    # All 16 of a rack send through their own link to the hall: 16 x 1.
    assert lay_out(target, [("x", 32)]).axes[0].bytes_per_s == 16.0


def test_links_by_axis_need_the_axis() -> None:
    target = Target.pure_communication({"data": (0, 1), "model": (0, 1)})
    with pytest.raises(
        HardwareError, match="axis 'modle'.*Did you mean 'model'"
    ) as info:
        lay_out(target, [("data", 2), ("modle", 2)])
    assert "data, model" in info.value.numbers and info.value.fix


def test_a_mesh_larger_than_the_hardware() -> None:
    with pytest.raises(MeshError, match="larger than the hardware 'h100:1x8'") as info:
        lay_out(load_target("h100:1x8"), [("x", 2), ("y", 8)])
    assert "mesh 2x8 has 16 devices" in info.value.numbers
    board = Tier(name="board", size=4, alpha_s=0, bytes_per_s=1)
    small = load_target("cpu").replace(tiers=(board,))
    with pytest.raises(MeshError, match="larger"):
        lay_out(small, [("x", 8)])


def test_axes_that_make_no_mesh() -> None:
    with pytest.raises(MeshError, match="same name"):
        lay_out(load_target("cpu"), [("x", 2), ("x", 2)])
    with pytest.raises(MeshError, match="no devices"):
        lay_out(load_target("cpu"), [("x", 2), ("y", 0)])


SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32]), max_size=4)


@settings(deadline=None, max_examples=200)
@given(hardware=st.sampled_from(hardware_names()), sizes=SIZES)
def test_every_mesh_gets_a_sane_answer(hardware: str, sizes: list[int]) -> None:
    target = load_target(hardware)
    best = max(t.bytes_per_s * max(1, 2 * t.rank) for t in target.tiers)
    for axis in _axes(target, *sizes):
        assert 0 < axis.bytes_per_s <= best
        assert 0 <= axis.alpha_s < 1
        assert axis.tier in {t.name for t in target.tiers}
        assert axis.topology in ("ring", "line", "switch", "barrier")


@pytest.mark.parametrize("hardware", hardware_names())
@pytest.mark.parametrize("num_bytes", [0.0, 1e3, 1e9])
def test_a_larger_axis_never_moves_a_devices_bytes_faster(
    hardware: str, num_bytes: float
) -> None:
    times = [_ring_s(_axes(hardware, 2**k)[0], num_bytes * 2**k) for k in range(1, 13)]
    assert times == sorted(times)


SWITCHED = [n for n in hardware_names() if not load_target(n).torus]


@pytest.mark.parametrize("hardware", SWITCHED)
@pytest.mark.parametrize("num_bytes", [0.0, 1e3, 1e9])
def test_a_larger_axis_on_switches_never_gathers_faster(
    hardware: str, num_bytes: float
) -> None:
    times = [_ring_s(_axes(hardware, 2**k)[0], num_bytes) for k in range(1, 13)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("hardware", "sizes"),
    [
        ("v5e", [(256 // n, n) for n in (2, 4, 8)]),  # lines along one dim
        ("v5e", [(n, 16) for n in (16, 32, 64, 128)]),  # a ring, then several pods
        ("v5p", [(n, 4, 4) for n in (4, 8)]),  # rings of one dim
        ("h100", [(n, 8) for n in (2, 4, 8, 32)]),  # hosts
        ("h100", [(8, n) for n in (2, 4, 8)]),  # inside a host
    ],
)
@pytest.mark.parametrize("num_bytes", [0.0, 1e3, 1e9])
def test_on_one_kind_of_link_a_larger_axis_never_gathers_faster(
    hardware: str, sizes: list[tuple[int, ...]], num_bytes: float
) -> None:
    position = 1 if len({s[1] for s in sizes}) > 1 else 0
    times = [_ring_s(_axes(hardware, *s)[position], num_bytes) for s in sizes]
    assert times == sorted(times)


@settings(deadline=None, max_examples=100)
@given(
    hardware=st.sampled_from(hardware_names()),
    num_devices=st.integers(2, 600),
    max_axes=st.integers(1, 4),
)
def test_mesh_shapes_are_few_distinct_and_ordered(
    hardware: str, num_devices: int, max_axes: int
) -> None:
    target = load_target(hardware)
    shapes = mesh_shapes(target, num_devices, max_axes)
    assert shapes == mesh_shapes(target, num_devices, max_axes)
    assert 1 <= len(shapes) <= 12
    assert len(set(shapes)) == len(shapes)
    assert shapes[0] == (num_devices,)
    assert [len(s) for s in shapes] == sorted(len(s) for s in shapes)
    for shape in shapes:
        assert math.prod(shape) == num_devices
        assert len(shape) <= max_axes and min(shape) >= 2


def test_mesh_shapes_of_eight() -> None:
    for name in ("cpu", "h100", "v5e"):
        assert mesh_shapes(load_target(name), 8) == ((8,), (2, 4), (4, 2), (2, 2, 2))
    assert mesh_shapes(load_target("cpu"), 8, max_axes=1) == ((8,),)
    assert mesh_shapes(load_target("cpu"), 1) == ((1,),)


def test_mesh_shapes_follow_the_physical_topology() -> None:
    assert mesh_shapes(load_target("v5e"), 256)[:2] == ((256,), (16, 16))
    assert mesh_shapes(load_target("h100"), 64)[:2] == ((64,), (8, 8))
    assert mesh_shapes(load_target("h100"), 32)[:2] == ((32,), (4, 8))
    shapes = mesh_shapes(load_target("v5p"), 64)
    assert shapes[1:3] == ((4, 16), (16, 4)) and (4, 4, 4) in shapes


def test_mesh_shapes_of_links_by_axis() -> None:
    target = Target.pure_communication({"data": (0, 1), "model": (0, 1)})
    assert mesh_shapes(target, 8) == ((8,), (2, 4), (4, 2))
    assert mesh_axis_names(target, 2) == ("data", "model")
    assert mesh_axis_names(load_target("cpu"), 3) == ("x", "y", "z")


def test_mesh_shapes_of_no_devices() -> None:
    with pytest.raises(MeshError, match="no devices"):
        mesh_shapes(load_target("cpu"), 0)
    with pytest.raises(MeshError, match="larger"):
        mesh_shapes(load_target("cpu:8"), 16)
