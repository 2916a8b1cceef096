"""Move a value from one submesh to another: which part of which shard goes where.

Residuals may be offloaded to host memory between forward and backward tasks. Tasks are
compiled as if all were on their devices: offloaded residuals are copied out
after the forward task and copied in ahead of the backward task, overlapping with
compute. For offload inside of one program, see `passes.remat.frame`.

Device memory is allocated when a task is dispatched, and an offloaded residual frees
its own when the copy has ended: so the dispatcher waits for that before it allocates
more, while devices work on the last dispatched tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding

from rhino_jax._compat import context_mesh
from rhino_jax.passes.staged.step import ValueKey
from rhino_jax.runtime.constraints import spec_over
from rhino_jax.runtime.processes.across import assembled


Piece = tuple[tuple[int, int], ...]
"""Index range of a part of an array: (start, stop) per dim."""

Route = tuple[Any, Any, Piece | None]
"""Source device, target device, and the part of the source's shard that is moved; None:
the whole shard."""


class Way(NamedTuple):
    """Values that one submesh sends to another.

    Attributes:
      source, target: indices of the submeshes.
      keys: the values.
      have: their shardings on the source.
    """

    source: int
    target: int
    keys: tuple[ValueKey, ...]
    have: Sequence[NamedSharding]


def leaving(
    have: NamedSharding, want: NamedSharding, shape: Sequence[int]
) -> NamedSharding:
    """Return the sharding in which a value leaves its submesh.

    Every shard that the target needs must be within one source shard. That is the
    value's own sharding, if it satisfies this, or the target's spec restricted to mesh
    axes of equal size in both.
    """
    sizes, others = have.mesh.shape, want.mesh.shape
    unlike = {name for name in sizes if sizes[name] != others.get(name)}
    if have.spec == want.spec and not unlike:
        return have
    if unlike and all(s is not None for s in _sources(have, want, shape)):
        return have
    return NamedSharding(have.mesh, spec_over(want.spec, sizes.keys() - unlike))


@dataclass(frozen=True, slots=True)
class MeshMove:
    """A transfer of a value from one mesh to another.

    Attributes:
      name: name of the value.
      aval: shape and dtype of the value.
      source, target: its shardings before and after.
      routes: route of each of the target's shards, in its order.
    """

    name: str
    aval: Any
    source: NamedSharding
    target: NamedSharding
    routes: tuple[Route, ...]

    @classmethod
    def of(
        cls, name: str, aval: Any, source: NamedSharding, target: NamedSharding
    ) -> MeshMove:
        """Plan a transfer.

        Args:
          name: name of the value.
          aval: shape and dtype of the value.
          source: its sharding; every shard of the target must be within one of its
            shards.
          target: the sharding after the transfer.
        """
        shape = tuple(aval.shape)
        have, want = _bounds(source, shape), _bounds(target, shape)
        routes = []
        devices = target.mesh.devices.flat
        for device, found in zip(devices, _sources(source, target, shape), strict=True):
            if found is None:
                index = want[device]
                raise ValueError(f"{name}: {source} has no shard {index} of {target}")
            routes.append((found, device, _within(want[device], have[found])))
        return cls(name, aval, source, target, tuple(routes))

    @property
    def text(self) -> str:
        ids = " ".join(f"{a.id}→{b.id} {piece or ''}" for a, b, piece in self.routes)
        what = f"{self.name} {self.aval.dtype}{list(self.aval.shape)}"
        return f"{what} {self.source.spec} → {self.target.spec} {ids}"

    @property
    def is_straight(self) -> bool:
        """Whether every shard goes to the same position in the other mesh."""
        flat = (sharding.mesh.devices.flat for sharding in (self.source, self.target))
        return [*self.routes] == [(a, b, None) for a, b in zip_longest(*flat)]

    @property
    def is_key(self) -> bool:
        return bool(jnp.issubdtype(self.aval.dtype, jax.dtypes.prng_key))

    def between(self, source: int, target: int) -> list[Route]:
        """Return the routes from one process to another."""
        return [
            route
            for route in self.routes
            if [d.process_index for d in route[:2]] == [source, target]
        ]

    def parts(self, x: Any, routes: Iterable[Route]) -> list[Any]:
        """Return what routes of the value move, on their source devices."""
        shards = shards_of(x)
        return [
            shards[a]
            if piece is None
            else lax.slice(shards[a], *zip(*piece, strict=True))
            for a, _, piece in routes
        ]

    def here(self, x: Any) -> jax.Array:
        """Return the value on its target, where both meshes are this process's."""
        if self.is_straight:
            return jax.device_put(x, self.target)
        devices = [b for _, b, _ in self.routes]
        moved = jax.device_put(self.parts(x, self.routes), devices)
        return assembled(self.aval, self.target, moved)


class Relaid:
    """Reshards values on their own mesh, by one program per pair of shardings."""

    def __init__(self) -> None:
        self._programs: dict[tuple[NamedSharding, NamedSharding], Any] = {}

    def __call__(self, x: Any, have: NamedSharding, want: NamedSharding) -> Any:
        if have == want:
            return x
        if (have, want) not in self._programs:
            self._programs[have, want] = jax.jit(_same, out_shardings=want)
        with in_mesh(have.mesh):
            return self._programs[have, want](x)


def in_mesh(mesh: Any) -> Any:
    """Return a mesh context for a submesh's programs.

    A mesh that the user has set would cover all devices; without one, none is needed.
    """
    return jax.set_mesh(mesh) if context_mesh() else nullcontext()


def shards_of(x: Any) -> dict[Any, Any]:
    """Return device → shard, for this process's shards of an array."""
    return {s.device: s.data for s in x.addressable_shards}


def _same(x: Any) -> Any:
    return x


def _bounds(sharding: NamedSharding, shape: Sequence[int]) -> dict[Any, Piece]:
    """Return device → index range of its shard."""
    found = sharding.devices_indices_map(tuple(shape))
    return {
        device: tuple(
            s.indices(size)[:2] for s, size in zip(index or (), shape, strict=True)
        )
        for device, index in found.items()
    }


def _within(wanted: Piece, shard: Piece) -> Piece | None:
    """Return an index range relative to a shard; None if it is the whole shard."""
    if wanted == shard:
        return None
    return tuple(
        (a - start, b - start) for (a, b), (start, _) in zip(wanted, shard, strict=True)
    )


def _sources(
    source: NamedSharding, target: NamedSharding, shape: Sequence[int]
) -> list[Any]:
    """Return a source device for each target device, whose shard has all that it needs.

    None where there is no such device.
    """
    have, want = _bounds(source, shape), _bounds(target, shape)
    flat = list(source.mesh.devices.flat)
    found = []
    for i, device in enumerate(target.mesh.devices.flat):
        # Prefer the device at the same position, if its shard will do.
        turned = [*flat[i % len(flat) :], *flat[: i % len(flat)]]
        near = [d for d in turned if d.process_index == device.process_index]
        holders = (
            d
            for d in (*near, *turned)
            if all(
                a <= c and e <= b
                for (a, b), (c, e) in zip(have[d], want[device], strict=True)
            )
        )
        found.append(next(holders, None))
    return found


HOST_KINDS = ("pinned_host", "unpinned_host")
"""Memory kinds of hosts, in order of preference.

GPUs and TPUs have the first, from which copies overlap with programs. CPUs that have
either copy values; those whose own memory it is leave them in place.
"""


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
    found = []
    for x, sharding in zip(arrays, wanted, strict=True):  # this process's shards
        shards, kind = shards_of(x), sharding.memory_kind
        places = [SingleDeviceSharding(device, memory_kind=kind) for device in shards]
        moved = jax.device_put([*shards.values()], places)
        found.append(assembled(x.aval, sharding, moved))
    return found
