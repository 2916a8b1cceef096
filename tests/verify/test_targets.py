"""Meshes to compile for, of hardware that is not here."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax._compat import is_compile_only
from rhino_jax.errors import HardwareError, MeshError
from rhino_jax.hardware import compile_only
from rhino_jax.hardware.compile_only import tpu_devices
from rhino_jax.hardware.files import configs_dir, detect_target, load_target
from rhino_jax.hardware.layout import mesh_shapes
from rhino_jax.verify.targets import compile_target
from tests.verify.extras import mesh_of_target


# Name, axes of the mesh without mesh=, and the name of what is detected.
TARGETS = [
    ("v5e:4x4", {"x": 4, "y": 4}, "v5e:4x4"),
    ("V5e:16", {"x": 4, "y": 4}, "v5e:4x4"),
    ("v5e:1x8", {"x": 8}, "v5e:1x8"),
    ("v5e:1x1", {"x": 1}, "v5e:1x1"),
    ("v5e:2x4x4", {"x": 2, "y": 4, "z": 4}, "v5e:2x4x4"),
    ("v6e:16x16", {"x": 16, "y": 16}, "v6e:16x16"),
    ("v5p:4x4x4", {"x": 4, "y": 4, "z": 4}, "v5p:4x4x4"),
    ("v5p:2x2x1", {"x": 2, "y": 2}, "v5p:2x2x1"),
    ("v4:2x2x4", {"x": 2, "y": 2, "z": 4}, "v4:2x2x4"),
    ("tpu7x:2x2x2", {"x": 2, "y": 2, "z": 4}, "tpu7x:2x2x2"),
    ("tpu7x:1x1x1", {"x": 2}, "tpu7x:1x1x1"),
    ("h100:8x8", {"x": 8, "y": 8}, "h100:8x8"),
    ("h100:8", {"x": 8}, "h100:1x8"),
    ("h100:2x4", {"x": 2, "y": 4}, "h100:2x4"),
    ("h200:1x8", {"x": 8}, "h200:1x8"),
    ("a100:2x8", {"x": 2, "y": 8}, "a100:2x8"),
    ("a100-40gb:1x1", {"x": 1}, "a100-40gb:1x1"),
    ("b200:1x72", {"x": 72}, "b200:1x72"),
]


@pytest.mark.compile_only
@pytest.mark.parametrize(("name", "axes", "detected"), TARGETS)
def test_meshes_of_targets(name: str, axes: dict[str, int], detected: str) -> None:
    mesh = mesh_of_target(name)
    assert dict(mesh.shape) == axes
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert len(set(mesh.devices.flat)) == mesh.size
    assert all(is_compile_only(d) for d in mesh.devices.flat)
    target = detect_target(list(mesh.devices.flat))
    assert target == load_target(detected)
    assert target.num_devices == mesh.size


@pytest.mark.compile_only
@pytest.mark.parametrize("name", ["v5e:2x2", "h100:1x4"])
def test_the_environment_is_left_as_it_was(name: str) -> None:
    before = dict(os.environ)
    default = jax.devices()
    mesh_of_target(name)
    assert dict(os.environ) == before
    assert jax.devices() == default


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        # Axes that are not whole sides of the torus.
        ("v5e:8x8", {"data": 16, "model": 4}),
        ("v5e:8x8", {"a": 2, "b": 4, "c": 8}),
        ("v5p:2x2x4", {"data": 2, "model": 8}),
        ("tpu7x:2x2x2", {"a": 2, "b": 2, "c": 2, "d": 2}),
        # An axis over two slices.
        ("v5e:2x4x4", {"data": 8, "model": 4}),
        ("v5e", {"data": 4, "model": 4}),
        ("h100", {"data": 32, "model": 2}),
        ("h100:2x8", {"data": 1, "model": 16}),
    ],
)
def test_meshes_of_ones_own(name: str, axes: dict[str, int]) -> None:
    mesh = mesh_of_target(name, axes)
    assert dict(mesh.shape) == axes and tuple(mesh.shape) == tuple(axes)
    kinds = (AxisType.Explicit,) * len(axes)
    abstract = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=kinds)
    again = mesh_of_target(name, abstract)
    assert again.axis_types == kinds
    assert (again.devices == mesh.devices).all()


@pytest.mark.compile_only
@pytest.mark.parametrize("name", ["v5e:4x8", "v5p:2x4x4", "tpu7x:2x2x4", "v6e:2x4x4"])
def test_every_mesh_that_rhino_tries_can_be_made(name: str) -> None:
    target = load_target(name)
    assert target.num_devices is not None
    for shape in mesh_shapes(target, target.num_devices, max_axes=4):
        axes = dict(zip("xyzw", shape, strict=False))
        assert len(set(mesh_of_target(name, axes).devices.flat)) == target.num_devices


@pytest.mark.compile_only
def test_minor_axes_run_over_neighbours() -> None:
    for row in mesh_of_target("h100:4x8").devices:
        assert len({d.process_index for d in row}) == 1
    for row in mesh_of_target("v5e:2x4x4", {"data": 8, "model": 4}).devices:
        assert len({d.slice_index for d in row}) == 1
    for row in mesh_of_target("v5e:4x8").devices:
        assert len({d.coords[0] for d in row}) == 1


@pytest.mark.compile_only
@pytest.mark.parametrize("name", ["v5e:2x4", "v4:2x2x2", "tpu7x:2x2x1", "a100:2x4"])
def test_a_planned_function_compiles_for_its_target(name: str) -> None:
    mesh = mesh_of_target(name)

    @rhino.auto_shard(mesh=mesh, progress=False)
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 256), (512, 256))]
    lowered = step.lower(*shapes)
    assert lowered.plan.hardware == name
    compiled = lowered.compile()
    # One number per device, and the result of the whole as planned.
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert "num_partitions=8" in compiled.as_text()
    with pytest.raises(MeshError, match="no devices to run on"):
        step(jnp.ones((256, 256)), jnp.ones((512, 256)))


@pytest.mark.compile_only
def test_a_hardware_file_of_ones_own(tmp_path: Path) -> None:
    text = (configs_dir() / "hardware" / "v5e.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('name = "v5e"', 'name = "mine"'))
    mesh = mesh_of_target(f"{tmp_path / 'mine.toml'}:2x2")
    assert mesh.devices.flat[0].device_kind == "TPU v5 lite" and mesh.size == 4


@pytest.mark.compile_only
@pytest.mark.parametrize("name", ["v5e:3x5", "v5p:3x2x2", "v6e:1x7"])
def test_topologies_that_libtpu_does_not_know(name: str) -> None:
    mesh_of_target("v5e:1x1")
    with pytest.raises(
        HardwareError, match=f"'{name}'.*knows no such topology"
    ) as info:
        tpu_devices(name)
    assert "divisible" in info.value.numbers and "even or 1" in info.value.fix
    with pytest.raises(HardwareError, match=f"'{name}': there is no"):
        compile_target(name)


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("name", "fix"), [("v5e:4x4", "'v5e:2x4'"), ("h100:2x8", "'h100:1x8'")]
)
def test_meshes_of_another_size(name: str, fix: str) -> None:
    mesh_of_target(name)
    with pytest.raises(MeshError, match=f"not of the size of '{name}'") as info:
        compile_target(name, {"data": 2, "model": 4})
    assert "mesh 2x4 has 8 devices" in info.value.numbers and "16" in info.value.numbers
    assert fix in info.value.fix


def _gpus(processes: list[int], runtime: str) -> list[Any]:
    client = SimpleNamespace(runtime_type=runtime)
    kind = "NVIDIA H100 80GB HBM3"
    return [
        SimpleNamespace(device_kind=kind, client=client, process_index=p)
        for p in processes
    ]


@pytest.mark.parametrize(
    ("processes", "runtime", "expected"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], "compile_only_runtime", "h100:2x4"),
        ([0, 0, 0, 1], "compile_only_runtime", "h100"),
        # Real GPUs may have a process each.
        ([0, 1, 2, 3], "stream_executor", "h100"),
    ],
)
def test_hosts_are_read_from_compile_only_devices(
    processes: list[int], runtime: str, expected: str
) -> None:
    assert detect_target(_gpus(processes, runtime)) == load_target(expected)


def test_names_that_are_not_known() -> None:
    with pytest.raises(HardwareError, match="Did you mean 'v5e'"):
        compile_target("v5ee:4x4")


@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_hardware_without_a_topology_or_a_mesh(name: str) -> None:
    with pytest.raises(HardwareError, match="has no topology") as info:
        compile_target(name)
    assert "v5e:4x4" in info.value.fix


def test_hardware_that_has_no_compiler() -> None:
    with pytest.raises(HardwareError, match="cannot be compiled for") as info:
        compile_target("cpu:8")
    assert "h100" in info.value.numbers and "compile_for='cpu'" in info.value.fix


@pytest.mark.parametrize(
    "mesh", [{}, {"x": 0}, {"x": 2.0}, {3: 4}, {"x": True}, 7, "x", (4, 4)]
)
def test_meshes_that_are_none(mesh: object) -> None:
    with pytest.raises(MeshError, match="`compile_target`"):
        compile_target("v5e:2x2", mesh)


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [
        # Topologies of no other test: devices are made once.
        ("v5e:2x10", "libtpu", "tpu"),
        ("h100:1x5", "jax_plugins.xla_cuda13", "gpu"),
    ],
)
def test_a_missing_extra_is_named(
    name: str, missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compile_only._find_spec
    monkeypatch.setattr(
        compile_only, "_find_spec", lambda m: None if m == missing else found(m)
    )
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(HardwareError, match="is not installed") as info:
        compile_target(name)
    assert missing in info.value.numbers
    assert f"pip install 'rhino_jax[{extra}]'" in info.value.fix


def test_only_gpus_that_are_not_here_need_options() -> None:
    for mesh in (jax.make_mesh((8,), ("x",)), AbstractMesh((8,), ("x",))):
        assert compile_only.compiler_options(mesh) == {}


@pytest.mark.compile_only
def test_options_of_ones_own_are_kept() -> None:
    mesh = mesh_of_target("h100:1x2")
    needed = compile_only.compiler_options(mesh)
    assert needed["xla_gpu_autotune_level"] == "0"
    assert (Path(needed["xla_gpu_cuda_data_dir"]) / "bin" / "ptxas").is_file()

    @rhino.auto_shard(mesh=mesh, progress=False)
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    lowered = double.lower(x)
    assert "num_partitions=2" in lowered.compile().as_text()
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        lowered.compile({"xla_no_such_option": "1"})
