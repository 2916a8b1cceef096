"""Read meshes: as given, in context, or from axis names and sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from rhino_jax._compat import is_compile_only
from rhino_jax.errors import MeshError
from rhino_jax.hardware.ordering import device_mesh
from rhino_jax.ir.spec import axes_text
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.utils.keywords import brief, whole


def read_mesh(mesh: Any, what: str = "`auto_shard`") -> Any | None:
    """Return the mesh that the user specifies; None where rhino chooses it.

    Args:
      mesh: a `Mesh`, an `AbstractMesh`, a mapping of axis name to size, or None.
      what: name of the calling API, for messages.
    Raises:
      MeshError: it is of another type, has a bad size, or has Manual axes.
    """
    if mesh is None:
        return None
    if isinstance(mesh, Mapping):
        return make_mesh(tuple(mesh.items()), what)
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(
            f"{what}: this is no mesh.",
            where="mesh=",
            numbers=f"got {type(mesh).__name__}",
            fix="pass a jax.sharding.Mesh, an AbstractMesh, {'data': 4, 'model': 2},"
            " or nothing.",
        )
    if not mesh.axis_names:
        raise MeshError(
            f"{what}: the mesh has no axes.",
            where="mesh=",
            numbers=str(mesh),
            fix="pass a mesh with axes, or nothing: rhino chooses.",
        )
    if mesh.manual_axes:
        raise MeshError(
            f"{what}: the mesh has Manual axes, as inside of `shard_map`.",
            where=", ".join(map(str, mesh.manual_axes)),
            numbers=f"axis types {mesh.axis_types}",
            fix="call it outside of shard_map, on Auto or Explicit axes.",
        )
    return mesh


def make_mesh(mesh_axes: Sequence[tuple[str, int]], what: str) -> Mesh | AbstractMesh:
    """Return a mesh with Auto axes of the present devices, in the order that costs are
    estimated for; abstract if the devices are too few.

    Raises:
      MeshError: no axes, a size that is no positive integer, or TPUs of which no box
        has as many.
    """
    names = tuple(name for name, _ in mesh_axes)
    read = [whole(size) for _, size in mesh_axes]
    sizes = tuple(size for size in read if size is not None and size >= 1)
    is_valid = len(sizes) == len(names) > 0
    if not is_valid or not all(isinstance(n, str) and n for n in names):
        raise MeshError(
            f"{what}: a mesh needs axes, each with a name and a size of at least 1.",
            where="mesh=",
            numbers=f"got {brief(dict(mesh_axes))}",
            fix="write mesh={'data': 4, 'model': 2}.",
        )
    kinds = (AxisType.Auto,) * len(names)
    present = devices_here(what)
    needed = math.prod(sizes)
    if needed > len(present):
        return AbstractMesh(sizes, names, axis_types=kinds)
    arranged = device_mesh(sizes, present, is_staged=STAGE_AXIS in names)
    if arranged is None:
        raise MeshError(
            f"{what}: no box of the present devices' torus has that many of them.",
            where="mesh=",
            numbers=f"{needed} of {len(present)} devices, {axes_text(mesh_axes)}",
            fix="take a mesh of a number of devices that fill a box, as all of them.",
        )
    return Mesh(arranged, names, axis_types=kinds)


def devices_here(what: str) -> list[Any]:
    """Return the devices of the default backend.

    Raises:
      MeshError: there are none.
    """
    try:
        return list(jax.devices())
    except RuntimeError as error:
        raise MeshError(
            f"{what}: JAX finds no devices.",
            numbers=str(error).splitlines()[0],
            fix="check JAX_PLATFORMS and the installed jaxlib, or set"
            " JAX_PLATFORMS=cpu to plan without an accelerator.",
        ) from None


def axes_of_mesh(mesh: Any) -> tuple[tuple[str, int], ...]:
    """Return (name, size) of the axes of a mesh, major first."""
    return tuple(
        (str(n), int(s)) for n, s in zip(mesh.axis_names, mesh.axis_sizes, strict=True)
    )


def can_run(mesh: Any) -> bool:
    """Whether the devices of a mesh are present: neither abstract nor compile-only."""
    return isinstance(mesh, Mesh) and not is_compile_only(mesh.devices.flat[0])


def not_runnable(plan: PlanData) -> MeshError:
    """Return the error of a call on a mesh that has no devices to run on."""
    needed = math.prod(size for _, size in plan.mesh_axes)
    have = len(jax.devices())
    axes = axes_text(plan.mesh_axes)
    return MeshError(
        f"`{plan.program_name}` cannot run: its mesh has no devices to run on.",
        where=f"mesh ({axes})",
        numbers=f"{needed} devices are needed, {have} are here"
        f" ({jax.default_backend()})",
        fix="pass a mesh of real devices, or emulate them on CPU by setting"
        f" XLA_FLAGS=--xla_force_host_platform_device_count={needed} before JAX"
        " starts; .plan(...) and .lower(...) need none.",
    )


def check_devices_of(eqn: Any, where: str, mesh: Any) -> None:
    """Refuse a `shard_map` over devices other than those that are compiled for.

    Args:
      eqn: equation of the `shard_map`; its mesh is concrete where the user's is.
      where: the user's source line.
      mesh: the mesh that the plan is applied to.
    Raises:
      MeshError: its mesh has other devices.
    """
    own = eqn.params["mesh"]
    if not (isinstance(own, Mesh) and isinstance(mesh, Mesh)):
        return
    if set(own.devices.flat) == set(mesh.devices.flat):
        return
    kinds = [m.devices.flat[0].device_kind for m in (own, mesh)]
    raise MeshError(
        "a `shard_map` is over other devices than those that the plan is compiled for.",
        where=where,
        numbers=f"{own.size} devices of kind {kinds[0]!r} there, {mesh.size} of kind"
        f" {kinds[1]!r} here",
        fix="leave mesh= out of the shard_map (it takes the mesh in context).",
    )
