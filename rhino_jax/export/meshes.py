"""The mesh of exported modules, as source that needs no rhino."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from rhino_jax.errors import HardwareError
from rhino_jax.export.pytrees import quoted, tuple_text
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.ordering import DeviceOrder, device_mesh, grid_of, order_on
from rhino_jax.hardware.target import Target
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.stages import STAGE_AXIS


def mesh_source(plan: PlanData, kind: str) -> tuple[str, str]:
    """Return imports, and the statement that makes a plan's mesh.

    Args:
      plan: the plan.
      kind: type of the mesh axes.
    """
    names, sizes = zip(*plan.mesh_axes, strict=True)
    types = f"(AxisType.{kind},) * {len(names)}"
    axes = f"{tuple_text(map(quoted, names))}, axis_types={types}"
    imports, devices = _devices_source(plan, sizes)
    if not devices:
        return (
            "",
            f"mesh = jax.make_mesh(\n    {tuple_text(map(str, sizes))}, {axes}\n)\n",
        )
    return imports, f"mesh = Mesh(\n{devices}    {axes},\n)\n"


def _devices_source(plan: PlanData, sizes: tuple[int, ...]) -> tuple[str, str]:
    """Return imports, and the devices in the mesh's shape; empty: `jax.make_mesh`."""
    given = plan.mesh
    if isinstance(given, Mesh) and not _is_usual(given):
        numbers = [int(d.id) for d in given.devices.flat]
        return (
            "import numpy as np\n",
            "    np.reshape(\n"
            f"        [{{d.id: d for d in jax.devices()}}[i] for i in {numbers}],\n"
            f"        {tuple_text(map(str, sizes))},\n"
            "    ),\n",
        )
    try:
        target = load_target(plan.hardware)
    except HardwareError:
        return "", ""
    grid = grid_of(target, math.prod(sizes))
    if grid is None:
        hosts = target.tiers[0].size if len(target.tiers) > 1 else None
        is_one = hosts is None or math.prod(sizes) <= hosts
        # `jax.make_mesh` refuses devices of several hosts.
        return ("", "") if is_one else (_UTILS, _created(sizes, ""))
    order = order_on(grid, sizes)
    is_staged = STAGE_AXIS in dict(plan.mesh_axes)
    return ("", "") if order is None else _torus_source(target, grid, order, is_staged)


def _is_usual(mesh: Mesh) -> bool:
    """Whether rhino makes this mesh of all its devices, or of the first of the CPUs."""
    present, own = jax.devices(), sorted(mesh.devices.flat, key=lambda d: d.id)
    if set(own) < set(present):
        if getattr(own[0], "coords", None) is not None:
            return False  # Which box they are is not in the plan's hardware.
        own = present
    is_staged = STAGE_AXIS in mesh.axis_names
    made = device_mesh(mesh.axis_sizes, own, is_staged=is_staged)
    return made is not None and bool((made == mesh.devices).all())


_UTILS = "from jax.experimental import mesh_utils\n"


def _created(sizes: tuple[int, ...], options: str) -> str:
    return (
        f"    mesh_utils.create_device_mesh({tuple_text(map(str, sizes))}{options}),\n"
    )


def _torus_source(
    target: Target, grid: tuple[int, ...], order: DeviceOrder, is_staged: bool
) -> tuple[str, str]:
    """Return imports and devices as JAX makes them, or else from their coordinates."""
    devices = _described(target, grid)
    made = device_mesh(order.sizes, devices, is_staged=is_staged)
    if order.box == grid and grid[0] == 1:
        for options in ("", ", allow_split_physical_axes=True"):
            # As in `jax.make_mesh`.
            splits = bool(options) or devices[0].device_kind in _SPLITS
            try:
                found = mesh_utils.create_device_mesh(
                    order.sizes, devices, allow_split_physical_axes=splits
                )
            except NotImplementedError:
                continue
            if (found == made).all():
                return (_UTILS, _created(order.sizes, options)) if options else ("", "")
    slices, *box, _ = order.box
    inside = "" if tuple(box) == grid[1:-1] else (
        f" if all(at < n for at, n in zip(d.coords, {tuple(box)}))"
    )  # fmt: skip
    inside += "" if slices == grid[0] else (
        f"{' and' if inside else ' if'} d.slice_index < {slices}"
    )  # fmt: skip
    chosen = f"[d for d in jax.devices(){inside}]" if inside else "jax.devices()"
    by_slice = "getattr(d, 'slice_index', 0), " if grid[0] > 1 else ""
    return (
        "import numpy as np\n",
        "    # By slice, place on the torus, and number on the chip.\n"
        "    np.array(sorted(\n"
        f"        {chosen},\n"
        f"        key=lambda d: ({by_slice}*d.coords, d.core_on_chip),\n"
        "    ))\n"
        f"    .reshape({tuple_text(map(str, order.split))})\n"
        f"    .transpose({tuple_text(map(str, order.axes))})\n"
        f"    .reshape({tuple_text(map(str, order.sizes))}),\n",
    )


_SPLITS = ("TPU v5 lite", "TPU v5e")
"""Kinds of devices on which `jax.make_mesh` splits torus dims."""


def _described(target: Target, grid: tuple[int, ...]) -> list[SimpleNamespace]:
    """Return objects with the places of a target's devices, in the order of ids."""
    slices, *dims, cores = grid
    sides = (*dims, 1, 1)[:3]
    places = itertools.product(*map(range, (slices, *sides[::-1], cores)))
    return [
        SimpleNamespace(
            id=number, platform="tpu", device_kind=target.device.kinds[0],
            slice_index=s, coords=(x, y, z), core_on_chip=core,
        )
        for number, (s, z, y, x, core) in enumerate(places)
    ]  # fmt: skip
