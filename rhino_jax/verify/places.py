"""Choose what a plan is compiled for: real, compile-only or emulated devices.

XLA:CPU makes as many devices as requested, also while JAX runs on others: a second CPU
client in this process, next to JAX's own and invisible to everything else. Programs
compile for it as in a process that was started with as many emulated devices: to the
same text, shardings, aliases and memory. So programs are compiled at full size: with
the shapes and devices of the plan, up to `MAX_DEVICES`. A device costs 0.3 MB and under
a millisecond; compile time does not depend on their number.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from rhino_jax._compat import make_cpu_devices
from rhino_jax.errors import HardwareError, MeshError
from rhino_jax.hardware.files import detect_target, load_target
from rhino_jax.hardware.target import Target
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.trees import check_mesh_axes
from rhino_jax.runtime.bound import Lowered
from rhino_jax.runtime.meshes import axes_of_mesh
from rhino_jax.verify.compile import NO_LIMIT, CompileLimit, compile_lowered
from rhino_jax.verify.hlo.records import Compilation
from rhino_jax.verify.targets import compile_target


MAX_DEVICES = 2048
"""XLA:CPU assigns devices with higher ids to another process, and refuses them.

Source: kMaxCpuDevicesPerProcess, xla/pjrt/cpu/cpu_topology_description.h.
"""

# Threads that XLA:CPU starts per device; measured: 1.5 (jax 0.10.2), 3.5 (0.12).
_THREADS_PER_DEVICE = 4


def emulated_mesh(mesh_axes: Mapping[str, int] | Sequence[tuple[str, int]]) -> Mesh:
    """Return a mesh of CPU devices to compile for, with Auto axes.

    This process's own devices where there are enough, in the order of `jax.make_mesh`.

    Args:
      mesh_axes: axis name → size, major first.
    Raises:
      MeshError: more than `MAX_DEVICES`, or more threads than this process may have.
    """
    axes = dict(mesh_axes)
    devices = emulated_devices(math.prod(axes.values()))
    return Mesh(
        np.array(devices).reshape(tuple(axes.values())),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
    )


def emulated_devices(count: int) -> list[Any]:
    """Return `count` CPU devices: this process's own, or compile-only ones.

    Raises:
      MeshError: see `emulated_mesh`.
    """
    own = _own_devices()
    if count <= len(own):
        return own[:count]
    if count > MAX_DEVICES:
        raise MeshError(
            "the mesh has more devices than XLA:CPU compiles for.",
            numbers=f"{count} devices, at most {MAX_DEVICES}",
            fix="compile for the hardware itself, as compile_for='v5e:16x16', which"
            " has no such limit; or for a smaller mesh.",
        )
    # Powers of two, so that meshes of several sizes share a client.
    return _made_devices(1 << (count - 1).bit_length())[:count]


def _own_devices() -> list[Any]:
    try:
        return list(jax.local_devices(backend="cpu"))
    except RuntimeError:
        # JAX was configured to start other backends only.
        return []


@functools.cache
def _made_devices(count: int) -> list[Any]:
    room = _thread_room()
    if count * _THREADS_PER_DEVICE > room:
        # XLA would abort the process.
        raise MeshError(
            "this process may not start enough threads to emulate the mesh.",
            numbers=f"{count} devices need up to {count * _THREADS_PER_DEVICE}"
            f" threads, there is room for {room}",
            fix="raise the limit (`ulimit -u`, or the container's pids limit), or"
            " compile for a smaller mesh.",
        )
    return make_cpu_devices(count)


def _thread_room() -> int:
    """Return how many more threads this process may start, as far as limits tell."""
    limits = [int(Path("/proc/sys/kernel/threads-max").read_text())]
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        limits.append(soft)
    group = Path("/sys/fs/cgroup/pids.max")
    if group.is_file() and (most := group.read_text().strip()) != "max":
        limits.append(int(most) - int(group.with_name("pids.current").read_text()))
    return max(0, min(limits))


class Compilations(Protocol):
    """Compiled programs by hash, as a `dict` holds them."""

    def get(self, program: str, /) -> Compilation | None:
        """Return a compiled program; None if there is none."""

    def __setitem__(self, program: str, compilation: Compilation, /) -> None: ...


class KnownProgram(NamedTuple):
    """A program that is compiled once.

    Attributes:
      program: hash of the program before compiling and of its target.
      compilation: the compiled program, or its out-of-memory error.
      is_cached: whether it was compiled before.
    """

    program: str
    compilation: Compilation
    is_cached: bool


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

    def compile_once(self, lowered: Lowered, known: Compilations) -> KnownProgram:
        """Compile a program, unless it was compiled before.

        Args:
          lowered: the program, lowered for the mesh.
          known: compiled programs; a new one is added.
        """
        # The text names the mesh's axes and their sizes.
        text = f"{self.target.name}\n{lowered.lowered.as_text()}"
        program = hashlib.sha256(text.encode()).hexdigest()[:16]
        cached = known.get(program)
        if cached is None:
            known[program] = compilation = self.compile(lowered)
            return KnownProgram(program, compilation, False)
        return KnownProgram(program, cached, True)


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
