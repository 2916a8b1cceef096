"""Values that wait in the host's memory from a forward pass to its backward pass.

Tasks are compiled as if all were on their devices: what waits is copied out behind the
forward task and copied in ahead of the backward task, beside what is computed then. Of
what compilers make of the same inside of a program, see `passes.remat.offload`.

Memory is taken when a task is dispatched, and what is copied out gives its own back
when it is there: so who dispatches waits for that before more is taken, while devices
work on what was dispatched last.
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
"""Memories of hosts, the first that a device knows. GPUs and TPUs know the first, from
which their copies run beside programs. Of CPUs that know either, values are copied;
those whose own memory it is keep them where they are."""

At = tuple[int, int]
"""Chunk and micro-batch."""


@dataclass(frozen=True, slots=True)
class Trips:
    """What goes to the host, or comes back, around a task.

    Attributes:
      gone: what is on the host before it is dispatched: else there is no room.
      goes_out: whether its own values go when it is.
      back: (what then comes back, what is on the host before).
    """

    gone: At | None = None
    goes_out: bool = False
    back: tuple[tuple[At, At], ...] = ()


STAYS = Trips()
"""Nothing goes anywhere."""


def trips_of(schedule: Schedule, chunks: Sequence[int]) -> dict[int, Trips]:
    """Of every task of a graph, by position, around which anything goes.

    Args:
      schedule: of the step.
      chunks: that have values that go.
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
    """A sharding of the same devices' hosts; itself where there is no such memory."""
    device = sharding.mesh.devices.flat[0]
    known = {memory.kind for memory in device.addressable_memories()}
    kind = next((kind for kind in HOST_KINDS if kind in known), None)
    return sharding if kind is None else sharding.with_memory_kind(kind)


def moved_to(
    arrays: Sequence[jax.Array], shardings: Iterable[NamedSharding]
) -> Sequence[Any]:
    """Arrays in other memory of the same devices; nothing is waited for."""
    wanted = list(shardings)
    if all(x.is_fully_addressable for x in arrays):
        return jax.device_put(arrays, wanted)
    return [_shards_to(x, sharding) for x, sharding in zip(arrays, wanted, strict=True)]


def _shards_to(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """As `moved_to`, of an array of which other processes have shards."""
    shards = shards_of(x)
    kind = sharding.memory_kind
    places = [SingleDeviceSharding(device, memory_kind=kind) for device in shards]
    return assembled(x.aval, sharding, jax.device_put([*shards.values()], places))
