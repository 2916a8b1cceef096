"""Choose what a plan is compiled for: real, compile-only or emulated devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from rhino_jax.errors import HardwareError, MeshError
from rhino_jax.hardware.files import detect_target, load_target
from rhino_jax.hardware.target import Target
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.trees import check_mesh_axes
from rhino_jax.runtime.lowering import Lowered
from rhino_jax.runtime.meshes import axes_of_mesh
from rhino_jax.verify.compile import compile_lowered
from rhino_jax.verify.emulate import emulated_mesh
from rhino_jax.verify.hlo.records import Compilation
from rhino_jax.verify.in_child import NO_LIMIT, CompileLimit
from rhino_jax.verify.targets import compile_target


@dataclass(frozen=True, slots=True)
class CompilePlace:
    """The mesh and the hardware that a program is compiled for.

    Attributes:
      mesh: mesh to lower for; its devices may be compile-only.
      target: the hardware whose rates turn compiled work into seconds.
      limit: how long compiling may take, of all programs together.
    """

    mesh: Mesh
    target: Target
    limit: CompileLimit = NO_LIMIT

    def compile(
        self, lowered: Lowered | jax.stages.Lowered, mesh: Mesh | None = None
    ) -> Compilation:
        """Compile a program that was lowered for the mesh, or for a submesh of it."""
        return compile_lowered(lowered, mesh=mesh or self.mesh, limit=self.limit)


def place_of(plan: PlanData, compile_for: Any, what: str) -> CompilePlace:
    """Return the mesh and the hardware that `plan` is compiled for.

    Args:
      plan: the plan.
      compile_for: "cpu"; a name of hardware with or without topology; a `Target`; or a
        mesh. None: the plan's mesh or, where it has no devices of the plan's hardware,
        a compile-only mesh of that hardware.
      what: name of the calling API, for messages.
    Raises:
      MeshError: the mesh has other axes than the plan's.
      HardwareError: its compiler does not exist or is not installed.
    """
    if compile_for is None:
        if isinstance(plan.mesh, Mesh) and _is_of(plan.mesh, plan.hardware):
            return place_on(plan.mesh, plan.hardware)
        compile_for = _hardware_of(plan, what)
    if isinstance(compile_for, Mesh):
        check_mesh_axes(what, axes_of_mesh(compile_for), plan.mesh_axes)
        return place_on(compile_for, plan.hardware)
    if not isinstance(compile_for, str | Path | Target):
        raise MeshError(
            f"{what}: this cannot be compiled for.",
            where="compile_for=",
            numbers=f"got {type(compile_for).__name__}",
            fix="pass 'cpu', hardware as 'v5e:4x4', a jax.sharding.Mesh, or nothing.",
        )
    target = load_target(compile_for)
    axes = dict(plan.mesh_axes)
    if "cpu" in target.device.kinds:
        return CompilePlace(emulated_mesh(axes), target)
    if isinstance(compile_for, Target):
        compile_for = compile_for.name
    mesh = compile_target(compile_for, axes)
    return CompilePlace(mesh, _target_of(mesh, str(compile_for)))


def _is_of(mesh: Mesh, hardware: str) -> bool:
    """Whether a mesh's devices are of this hardware, or the name does not tell.

    A plan for TPUs has a mesh of CPU devices where there are as many of these.
    """
    try:
        kinds = load_target(hardware).device.kinds
    except HardwareError:
        return True
    return not kinds or str(mesh.devices.flat[0].device_kind) in kinds


def _hardware_of(plan: PlanData, what: str) -> str:
    """Return the name of the plan's hardware, if a target can be loaded by it."""
    try:
        load_target(plan.hardware)
    except HardwareError:
        raise HardwareError(
            f"{what}: the plan's hardware cannot be found by its name.",
            where=f"`Plan.hardware` is {plan.hardware!r}, and the plan's mesh has no"
            " devices",
            fix="say what to compile for: compile_for='v5e:4x4', 'cpu', a mesh, or the"
            " path of its file.",
        ) from None
    return plan.hardware


def place_on(mesh: Mesh, hardware: str | None) -> CompilePlace:
    """Return a mesh of devices with the hardware whose rates apply to it.

    Args:
      mesh: a mesh of real or compile-only devices.
      hardware: preferred hardware, used where the mesh's devices are of it; None:
        detected.
    """
    return CompilePlace(mesh, _target_of(mesh, hardware))


def _target_of(mesh: Mesh, hardware: str | None) -> Target:
    devices = list(mesh.devices.flat)
    if hardware is not None:
        try:
            target = load_target(hardware)
        except HardwareError:
            # A user's own target, of which the plan only has the name.
            return detect_target(devices)
        if str(devices[0].device_kind) in target.device.kinds:
            return target
    return detect_target(devices)
