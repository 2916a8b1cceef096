"""Make meshes of hardware that is not present, to compile for.

`compile_target("v5p:4x4x4")` takes the names that `load_target` takes, and returns a
mesh that plans, lowers and compiles as one of real devices would: with the real
compiler, for the real topology.

Devices are ordered as real ones are (`hardware.ordering`). Where a name has no
topology, `topology_for` takes the usual one for the number of devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import AxisType, Mesh

from rhino_jax.errors import HardwareError, MeshError
from rhino_jax.hardware.compile_only import gpu_devices, tpu_devices
from rhino_jax.hardware.files import configs_dir, hardware_names, load_target
from rhino_jax.hardware.layout import mesh_axis_names
from rhino_jax.hardware.ordering import device_mesh
from rhino_jax.hardware.target import Target, Tier
from rhino_jax.hardware.topology import factorisations
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.runtime.meshes import axes_of_mesh, read_mesh


def devices_per_chip(target: Target) -> int:
    """Return the number of devices that share one position of the torus."""
    within = itertools.takewhile(lambda t: t.topology != "torus", target.tiers)
    return max((t.size or 1 for t in within), default=1)


def topology_for(hardware: str | Path, num_devices: int) -> str:
    """Return the name of hardware with its usual topology for a number of devices.

    TPU: of the slices that libtpu can describe, one with wrap-around links in all dims
    if there is one, then the most cubic, then the one on fewest hosts: ("v5e", 16) →
    "v5e:4x4", ("v5p", 16) → "v5p:2x2x4". More devices than one slice has use the fewest
    slices. GPU: as many GPUs per host as divide the number evenly: ("h100", 64) →
    "h100:8x8".

    Args:
      hardware: a name or file without its topology, as for `load_target`.
      num_devices: number of JAX devices; a tpu7x chip has two.
    Raises:
      HardwareError: the name is unknown, or there is no such topology.
    """
    target = load_target(hardware)
    name = str(hardware).strip()
    torus = target.torus
    dims: tuple[int, ...] | None = None
    if num_devices >= 1 and target.num_devices is None:
        if torus is None:
            dims = _hosts(target, num_devices)
        elif num_devices % devices_per_chip(target) == 0:
            dims = _slices(torus, devices_per_chip(target), num_devices)
    if dims is not None:
        return f"{name}:{'x'.join(map(str, dims))}"
    raise HardwareError(
        f"hardware {name!r}: no topology of {num_devices} devices is known.",
        numbers="two sides of a TPU slice must each be even or 1, and a tpu7x chip is"
        " two devices",
        fix="use a number of devices with more factors of 2, or name the topology, as"
        " v5e:4x4.",
    )


def _hosts(target: Target, num_devices: int) -> tuple[int, ...] | None:
    if len(target.tiers) != 2:
        return None
    most = min(target.tiers[0].size or num_devices, num_devices)
    gpus = max(n for n in range(1, most + 1) if num_devices % n == 0)
    return num_devices // gpus, gpus


def _slices(torus: Tier, chip_devices: int, num_devices: int) -> tuple[int, ...] | None:
    """Return the number of slices, if several, and each slice's dims in chips."""
    chips = num_devices // chip_devices
    largest = chips if torus.size is None else torus.size // chip_devices
    if chips <= largest:
        return _slice(torus, chips)
    for slices in range(-(-chips // largest), chips + 1):
        sides = _slice(torus, chips // slices) if chips % slices == 0 else None
        if sides is not None:
            return slices, *sides
    return None


def _slice(torus: Tier, chips: int) -> tuple[int, ...] | None:
    """Return the dims of the best slice of that many chips, or None."""
    return min(
        (sides for sides in factorisations(chips, torus.rank) if torus.is_built(sides)),
        key=lambda sides: (
            not all(torus.wraps(sides)),
            sum(sides),
            # Hosts, each with a square of four chips.
            math.prod(-(-side // 2) for side in sides[:2]) * math.prod(sides[2:]),
            sides,
        ),
        default=None,
    )


Axes = tuple[tuple[str, int], ...]
_WHAT = "`compile_target`"


def compile_target(name: str | Path, mesh: Any = None) -> Mesh:
    """Return a mesh of devices that programs can be compiled for, but not run on.

    Needs no such hardware, only its compiler: `pip install 'rhino_jax[tpu]'` or
    `'rhino_jax[gpu]'`. Without an accelerator, set JAX_PLATFORMS=cpu, or JAX warns at
    start that these plugins find none, which is harmless.

    Args:
      name: hardware with its topology, as for `load_target`: "v5e:4x4" (chips),
        "v5p:4x4x4", "tpu7x:2x2x2" (two devices a chip), "v5e:2x16x16" (two slices),
        "h100:8x8" (hosts x GPUs), "h100:8" (GPUs of one host). Without a topology,
        the usual one for the size of `mesh`.
      mesh: mapping of axis name → size, or an `AbstractMesh`; axes major first. None:
        an axis x, y, … for every side of the topology that is longer than 1, where
        the two devices of a tpu7x chip belong to the last.
    Returns:
      A mesh, with Auto axes unless `mesh` has others.
    Raises:
      HardwareError: the name is unknown, there is no compiler for it, its compiler
        is not installed, or it knows no such topology.
      MeshError: `mesh` has no axes, a bad size, or another number of devices.
    Example:
      >>> mesh = rhino.compile_target("v5e:4x4", {"data": 4, "model": 4})
      >>> rhino.auto_shard(step, mesh=mesh).lower(*shapes).compile()
    """
    axes, kinds = _read_axes(mesh)
    target = _with_topology(name, axes)
    devices, sides = _devices(target, _generation(target))
    if axes is None:
        sides = tuple(n for n in sides if n > 1) or (1,)
        sides = (*sides[:-1], sides[-1] * (len(devices) // math.prod(sides)))
        axes = tuple(zip(mesh_axis_names(target, len(sides)), sides, strict=True))
        kinds = (AxisType.Auto,) * len(axes)
    sizes = tuple(n for _, n in axes)
    if math.prod(sizes) != len(devices):
        raise MeshError(
            f"{_WHAT}: the mesh is not of the size of {target.name!r}.",
            where="mesh=",
            numbers=f"mesh {'x'.join(map(str, sizes))} has {math.prod(sizes)} devices,"
            f" {target.name} has {len(devices)}",
            fix=_other_size(target, math.prod(sizes)),
        )
    is_staged = STAGE_AXIS in dict(axes)
    arranged = device_mesh(sizes, devices, is_staged=is_staged)
    assert arranged is not None  # the whole topology is a box
    return Mesh(arranged, [n for n, _ in axes], axis_types=kinds)


def _with_topology(name: str | Path, axes: Axes | None) -> Target:
    """Return the target with the topology that is named, or the usual one.

    Raises:
      HardwareError: the name is unknown, or the number of devices is not given.
    """
    target = load_target(name)
    count = target.num_devices
    if count is None and axes is None:
        raise HardwareError(
            f"{_WHAT}: hardware {target.name!r} has no topology.",
            fix="write it as v5e:4x4, v5p:4x4x4 or h100:8x8, or give the mesh:"
            " mesh={'data': 4, 'model': 4}.",
        )
    if count is None:
        assert axes is not None
        return load_target(topology_for(name, math.prod(n for _, n in axes)))
    torus = target.torus
    has_sides = torus.dims if torus else count % (target.tiers[0].size or 1) == 0
    if has_sides:
        return target
    return load_target(topology_for(target.name.rpartition(":")[0], count))


def _read_axes(mesh: Any) -> tuple[Axes | None, Any]:
    """Return (name, size) and the types of the mesh axes that the user requests."""
    if isinstance(mesh, Mapping):
        bad = [n for n in mesh.values() if type(n) is not int or n < 1]
        if not mesh or bad or not all(isinstance(n, str) for n in mesh):
            raise MeshError(
                f"{_WHAT}: a mesh needs axes, each with a name and a size of at"
                " least 1.",
                where="mesh=",
                numbers=f"got {dict(mesh)}",
                fix="write mesh={'data': 4, 'model': 2}.",
            )
        return tuple(mesh.items()), (AxisType.Auto,) * len(mesh)
    read = read_mesh(mesh, _WHAT)
    return (None, ()) if read is None else (axes_of_mesh(read), read.axis_types)


def _generation(target: Target) -> str:
    """Return the name of the shipped hardware file that describes the same devices.

    Raises:
      HardwareError: there is no such file, or no compiler for the hardware.
    """
    known = {name: load_target(name) for name in hardware_names()}
    for name, shipped in known.items():
        if set(shipped.device.kinds) & set(target.device.kinds) and (
            shipped.torus or _description(name).is_file()
        ):
            return name
    can = [n for n, t in known.items() if t.torus or _description(n).is_file()]
    kinds = ", ".join(map(repr, target.device.kinds)) or "not stated"
    raise HardwareError(
        f"hardware {target.name!r}: it cannot be compiled for without its devices.",
        numbers=f"device_kinds: {kinds}; there are compilers for {', '.join(can)}",
        fix="name one of these; meshes of CPU devices are emulated, with"
        " compile_for='cpu'.",
    )


def _description(generation: str) -> Path:
    return configs_dir() / "xla_gpu" / f"{generation}.txtpb"


def _devices(
    target: Target, generation: str
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return the devices and the dims of the topology, major first."""
    count, torus = target.num_devices, target.torus
    assert count is not None
    if torus is None:
        gpus = min(target.tiers[0].size or count, count)
        hosts = count // gpus
        return gpu_devices(_description(generation), hosts, gpus), (hosts, gpus)
    slices = count // (torus.size or count)
    topology = f"{generation}:{'x'.join(map(str, torus.dims))}"
    return tpu_devices(topology, slices), (slices, *torus.dims)


def _other_size(target: Target, num_devices: int) -> str:
    try:
        fitting = topology_for(target.name.rpartition(":")[0], num_devices)
    except HardwareError:
        return f"give a mesh of {target.num_devices} devices."
    return f"compile for {fitting!r}, or give a mesh of {target.num_devices} devices."
