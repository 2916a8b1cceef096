"""Make meshes of more CPU devices than this process has, for compiling.

XLA:CPU makes as many devices as requested, also while JAX runs on others: a second CPU
client in this process, next to JAX's own and invisible to everything else. Programs
compile for it as in a process that was started with as many emulated devices: to the
same text, shardings, aliases and memory. So programs are compiled at full size: with
the shapes and devices of the plan, up to `MAX_DEVICES`. A device costs 0.3 MB and under
a millisecond; compile time does not depend on their number.
"""

from __future__ import annotations

import functools
import math
import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from rhino_jax._compat import make_cpu_devices
from rhino_jax.errors import MeshError


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
