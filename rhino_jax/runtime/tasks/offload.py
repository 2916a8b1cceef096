"""Offload residuals to host memory between forward and backward tasks.

Tasks are compiled as if all were on their devices: offloaded residuals are copied out
after the forward task and copied in ahead of the backward task, overlapping with
compute. For offload inside of one program, see `passes.remat.offload`.

Device memory is allocated when a task is dispatched, and an offloaded residual frees
its own when the copy has ended: so the dispatcher waits for that before it allocates
more, while devices work on the last dispatched tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from rhino_jax.pipeline.offload import moved
from rhino_jax.pipeline.tasks import Schedule
from rhino_jax.runtime.processes.across import assembled
from rhino_jax.runtime.tasks.moves import shards_of


HOST_KINDS = ("pinned_host", "unpinned_host")
"""Memory kinds of hosts, in order of preference.

GPUs and TPUs have the first, from which copies overlap with programs. CPUs that have
either copy values; those whose own memory it is leave them in place.
"""

At = tuple[int, int]
"""Chunk and micro-batch of residuals."""


@dataclass(frozen=True, slots=True)
class Trips:
    """Residuals that are offloaded, or fetched back, around a task.

    Attributes:
      gone: residuals that must be in host memory before the task is dispatched, or
        there is no room; None: no wait.
      goes_out: whether the task's own residuals are offloaded after it.
      back: (residuals to fetch after the task, residuals that must be in host memory
        before).
    """

    gone: At | None = None
    goes_out: bool = False
    back: tuple[tuple[At, At], ...] = ()


STAYS = Trips()
"""No transfer to or from host memory."""


def trips_of(schedule: Schedule, chunks: Sequence[int]) -> dict[int, Trips]:
    """Return position of a task in the graph → its offload transfers, where it has any.

    Args:
      schedule: schedule of the step.
      chunks: chunks with offloaded residuals.
    """
    found: dict[int, Trips] = {}

    def at(task: int) -> At:
        of = schedule.graph.tasks[task]
        return of.chunk, of.micro_batch

    for move in moved(schedule, chunks):
        gone = None if move.gone is None else at(move.gone)
        before = found.get(move.forward, STAYS)
        found[move.forward] = replace(before, gone=gone, goes_out=True)
        gate = found.get(move.fetched_after, STAYS)
        back = (*gate.back, (at(move.forward), at(move.made_room)))
        found[move.fetched_after] = replace(gate, back=back)
    return found


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Return a sharding in host memory of the same devices; itself if there is none."""
    device = sharding.mesh.devices.flat[0]
    known = {memory.kind for memory in device.addressable_memories()}
    kind = next((kind for kind in HOST_KINDS if kind in known), None)
    return sharding if kind is None else sharding.with_memory_kind(kind)


def moved_to(
    arrays: Sequence[jax.Array], shardings: Iterable[NamedSharding]
) -> Sequence[Any]:
    """Move arrays to another memory of the same devices, asynchronously."""
    wanted = list(shardings)
    if all(x.is_fully_addressable for x in arrays):
        return jax.device_put(arrays, wanted)
    return [_shards_to(x, sharding) for x, sharding in zip(arrays, wanted, strict=True)]


def _shards_to(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Move this process's shards of an array, as `moved_to`."""
    shards = shards_of(x)
    kind = sharding.memory_kind
    places = [SingleDeviceSharding(device, memory_kind=kind) for device in shards]
    return assembled(x.aval, sharding, jax.device_put([*shards.values()], places))
