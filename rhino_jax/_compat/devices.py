"""Devices, their processes, and compiling for them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import math
import operator
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax._src import (
    api,
    config,
    dispatch,
    distributed,
    hardware_utils,
    xla_bridge,
)
from jaxlib import xla_client


sharding_of_array = operator.attrgetter(
    "_sharding" if hasattr(xla_client.ArrayImpl, "_sharding") else "sharding"
)
"""Function from an array to its sharding; `jax.Array.sharding`, a property written in
Python, takes twice the time. Same on both versions."""

is_array_deleted = xla_client.ArrayImpl.is_deleted
"""Function from an array to whether its buffers are gone; TypeError for anything else.
A third of the time of looking the method up on each. Same on both versions."""


def is_compile_only(device: Any) -> bool:
    """Whether a device can be compiled for but not run on (a topology's device).

    Same on both versions.
    """
    client = getattr(device, "client", None)
    return "compile_only" in str(getattr(client, "runtime_type", ""))


def coordination_client() -> Any | None:
    """Return the client of JAX's coordination service; None without `jax.distributed`.

    Has `key_value_set_bytes`, `blocking_key_value_get_bytes`, `key_value_try_get` and
    `key_value_delete`. Same on both versions.
    """
    return distributed.global_state.client


def own_host() -> str:
    """Return the address by which other processes of `jax.distributed` reach this one.

    That of its network interface to the coordination service. Same on both versions.
    """
    host, _, port = str(distributed.global_state.coordinator_address).rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        # Connecting a datagram socket sends nothing; it chooses the interface.
        way.connect((host, int(port)))
        return str(way.getsockname()[0])


def num_tpu_chips() -> int:
    """Return the number of TPU chips in this machine. Same on both versions."""
    count, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    return int(count)


def make_cpu_devices(count: int) -> list[Any]:
    """Make emulated CPU devices with a client of their own. Same on both versions."""
    client: Any = xla_client.make_cpu_client(num_devices=count)
    return list(client.devices())


def num_emulated_devices() -> int:
    """Return the number of CPU devices that JAX starts, or has started, here.

    From the configuration, or else the XLA flag. Same on both versions.
    """
    configured: Any = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if configured >= 0:
        return int(configured)
    flag = r"--xla_force_host_platform_device_count=(\d+)"
    found = re.findall(flag, os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else 1


def at_cpu_client(around: Callable[[], AbstractContextManager[None]]) -> None:
    """Make JAX start its CPU devices within a context, unless they are started already.

    Same on both versions.

    Args:
      around: returns the context; called when the devices are started.
    """
    registered: Any = xla_bridge._backend_factories.get("cpu")
    if registered is None:
        return

    def start(*args: Any, **kwargs: Any) -> Any:
        with around():
            return registered.factory(*args, **kwargs)

    with contextlib.suppress(RuntimeError):  # they are started already
        xla_bridge.register_backend_factory(
            "cpu",
            start,
            priority=registered.priority,
            fail_quietly=registered.fail_quietly,
        )


def end_without_others() -> None:
    """Let this process exit without JAX's own cleanup, which waits for other processes.

    Clients of devices and of the coordination service are never destroyed: some of
    their calls may never return. Same on both versions.
    """
    atexit.unregister(api.clean_up)
    atexit.unregister(dispatch.wait_for_tokens)
    state = distributed.global_state
    immortal = [state.client, state.service, state.preemption_sync_manager]
    for client in (*immortal, *xla_bridge._backends.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


def parameter_axes(lowered: jax.stages.Lowered) -> tuple[frozenset[str] | None, ...]:
    """Return the mesh axes that each parameter of a lowered program is sharded over.

    Only parameters of the lowered program: constants first, without arguments that it
    does not read. None for one whose sharding names no axes. Same on both versions.
    """
    lowering = getattr(lowered, "_lowering", None)
    shardings = getattr(lowering, "compile_args", {}).get("in_shardings", ())
    return tuple(
        frozenset(
            axis
            for dim in x.spec
            for axis in (dim if isinstance(dim, tuple) else (dim,))
            if axis is not None
        )
        if isinstance(x, jax.sharding.NamedSharding)
        else None
        for x in shardings
    )


_COMPILATIONS = itertools.count(1_000_000)


@contextlib.contextmanager
def compiling_anew() -> Iterator[dict[str, str | bool]]:
    """Compile without JAX's compilation caches within this context.

    Yields an XLA option that is part of every cache key and changes no program: how
    many buffers XLA's debug output would show, of which there is none. Nothing is
    written to the persistent cache either. Same on both versions.
    """
    with config.persistent_cache_min_compile_time_secs(math.inf):
        yield {"xla_debug_buffer_assignment_show_max": str(next(_COMPILATIONS))}


def only_nccl() -> dict[str, str]:
    """Return options that leave collectives on GPU to NCCL.

    On 0.12 XLA emits kernels of its own for small all-reduces, and aborts with an LLVM
    error for some whose result is a scalar ("size mismatch when packing elements for
    LLVM struct"); 0.10 does not know the option.
    """
    if jax.__version_info__ < (0, 12):
        return {}
    return {"xla_gpu_experimental_use_collective_kernels": ""}
