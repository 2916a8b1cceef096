"""A value that goes from one group's devices to another's: which piece to which."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from rhino_jax._compat import context_mesh
from rhino_jax.runtime.processes.across import assembled


Piece = tuple[tuple[int, int], ...]
"""(start, stop) in every dim."""


def leaving(
    have: NamedSharding, want: NamedSharding, shape: Sequence[int]
) -> NamedSharding:
    """How a value is laid out on its group so that every shard that another group wants
    is within one: as it is, if that will do, or as it is wanted, cut over those mesh
    axes that have as many devices in both groups."""
    sizes, others = have.mesh.shape, want.mesh.shape
    unlike = {name for name in sizes if sizes[name] != others.get(name)}
    if have.spec == want.spec and not unlike:
        return have
    if unlike and all(s is not None for s in _sources(have, want, shape)):
        return have
    kept = [
        tuple(name for name in _names(dim) if name not in unlike) for dim in want.spec
    ]
    return NamedSharding(have.mesh, PartitionSpec(*(k or None for k in kept)))


def _names(dim: Any) -> tuple[str, ...]:
    return () if dim is None else (dim,) if isinstance(dim, str) else tuple(dim)


@dataclass(frozen=True, slots=True)
class MeshMove:
    """A value that goes from one mesh to another.

    Attributes:
      name: of the value.
      aval: its shape and dtype.
      source, target: its shardings.
      pairs: (device that has a shard, device that gets it or a piece of it), in the
        target's order.
      pieces: of every pair, what of the shard; None: all of it.
    """

    name: str
    aval: Any
    source: NamedSharding
    target: NamedSharding
    pairs: tuple[tuple[Any, Any], ...]
    pieces: tuple[Piece | None, ...]

    @classmethod
    def of(
        cls, name: str, aval: Any, source: NamedSharding, target: NamedSharding
    ) -> MeshMove:
        """
        Args:
          source: as the value is; every shard of the target must be within one of it.
        """
        shape = tuple(aval.shape)
        have, want = _bounds(source, shape), _bounds(target, shape)
        pairs, pieces = [], []
        devices = target.mesh.devices.flat
        for device, found in zip(devices, _sources(source, target, shape), strict=True):
            if found is None:
                index = want[device]
                raise ValueError(f"{name}: {source} has no shard {index} of {target}")
            pairs.append((found, device))
            pieces.append(_within(want[device], have[found]))
        return cls(name, aval, source, target, tuple(pairs), tuple(pieces))

    @property
    def text(self) -> str:
        ids = " ".join(f"{a.id}→{b.id}" for a, b in self.pairs)
        what = f"{self.name} {self.aval.dtype}{list(self.aval.shape)}"
        pieces = "" if self.is_of_whole_shards else f" {self.pieces}"
        return f"{what} {self.source.spec} → {self.target.spec} {ids}{pieces}"

    @property
    def is_of_whole_shards(self) -> bool:
        return not any(self.pieces)

    @property
    def is_straight(self) -> bool:
        """Whether every shard goes to its own place in the other mesh."""
        flat = self.source.mesh.devices.ravel(), self.target.mesh.devices.ravel()
        is_alike = len(flat[0]) == len(flat[1]) and self.is_of_whole_shards
        return is_alike and self.pairs == tuple(zip(*flat, strict=True))

    @property
    def is_key(self) -> bool:
        return bool(jnp.issubdtype(self.aval.dtype, jax.dtypes.prng_key))

    def between(self, source: int, target: int) -> list[tuple[Any, Any, Piece | None]]:
        """Pairs of devices of two processes, each with its piece."""
        return [
            (a, b, piece)
            for (a, b), piece in zip(self.pairs, self.pieces, strict=True)
            if (a.process_index, b.process_index) == (source, target)
        ]

    def here(self, x: Any) -> jax.Array:
        """The value on its target, where both meshes are this process's."""
        if self.is_straight:
            return jax.device_put(x, self.target)
        shards = shards_of(x)
        parts = [
            part_of(shards[a], piece)
            for (a, _), piece in zip(self.pairs, self.pieces, strict=True)
        ]
        moved = jax.device_put(parts, [b for _, b in self.pairs])
        return assembled(self.aval, self.target, moved)


class Relaid:
    """Lays values out anew on their own mesh, by a program for each way."""

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
    """A context for a group's programs: a mesh that the user has set is of all."""
    return jax.set_mesh(mesh) if context_mesh() else nullcontext()


def shards_of(x: Any) -> dict[Any, Any]:
    """What each of this process's devices has of an array."""
    return {s.device: s.data for s in x.addressable_shards}


def part_of(shard: Any, piece: Piece | None) -> Any:
    """A piece of a shard, on its device."""
    if piece is None:
        return shard
    return lax.slice(shard, [a for a, _ in piece], [b for _, b in piece])


def _same(x: Any) -> Any:
    return x


def _bounds(sharding: NamedSharding, shape: Sequence[int]) -> dict[Any, Piece]:
    """Of every device, what it has of a value of that shape."""
    found = sharding.devices_indices_map(tuple(shape))
    return {
        device: tuple(
            s.indices(size)[:2] for s, size in zip(index or (), shape, strict=True)
        )
        for device, index in found.items()
    }


def _within(wanted: Piece, shard: Piece) -> Piece | None:
    """A piece of a value as one of a shard; None: all of it."""
    if wanted == shard:
        return None
    return tuple(
        (a - start, b - start) for (a, b), (start, _) in zip(wanted, shard, strict=True)
    )


def _sources(
    source: NamedSharding, target: NamedSharding, shape: Sequence[int]
) -> list[Any]:
    """Of every device of the target, one of the source whose shard has what it wants;
    None where there is none."""
    have, want = _bounds(source, shape), _bounds(target, shape)
    flat = list(source.mesh.devices.flat)
    found = []
    for i, device in enumerate(target.mesh.devices.flat):
        # A shard comes from the device at its own place, if that has it.
        turned = [*flat[i % len(flat) :], *flat[: i % len(flat)]]
        near = [d for d in turned if d.process_index == device.process_index]
        found.append(
            next((d for d in (*near, *turned) if _has(have[d], want[device])), None)
        )
    return found


def _has(shard: Piece, wanted: Piece) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(shard, wanted, strict=True))
