"""Transfer values between submeshes that span several processes.

Both sides compute the id of a transfer from its contents (values, shapes, dtypes,
shards, devices), the step, and its position in the step's order. So transfers that
differ between two processes never match, but time out. Runs on
`jax.experimental.transfer`: asynchronous, and in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from rhino_jax.passes.staged.step import StagedStep, ValueKey
from rhino_jax.runtime.placing import impl_of
from rhino_jax.runtime.processes.across import assembled, here
from rhino_jax.runtime.processes.running import Running
from rhino_jax.runtime.processes.service import first_line
from rhino_jax.runtime.tasks.moves import MeshMove, Relaid, Way, leaving
from rhino_jax.runtime.tasks.programs import GroupPrograms


MASK = (1 << 62) - 1
"""Mask of transfer ids, 62 bits."""

_STRIDE = 0x9E3779B97F4A7C15
"""2⁶⁴ ÷ golden ratio: spreads consecutive integers (Knuth, TAOCP 3, section 6.4)."""


@dataclass(frozen=True, eq=False)
class Packet:
    """Values that are transferred together from one submesh to another.

    Attributes:
      moves: the move of each value.
    """

    moves: tuple[MeshMove, ...]

    @cached_property
    def _tag(self) -> int:
        text = "\n".join(move.text for move in self.moves)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    @cached_property
    def is_whole(self) -> bool:
        """Whether it goes from one process to one, every shard to the same position."""
        return len(self.between) == 1 and all(
            move.is_straight and not move.is_key for move in self.moves
        )

    @cached_property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the values with their target shardings."""
        return [
            jax.ShapeDtypeStruct(m.aval.shape, m.aval.dtype, sharding=m.target)
            for m in self.moves
        ]

    def number(self, base: int, count: int, source: int, target: int) -> int:
        """Return the id of the transfer between two processes.

        Args:
          base: base of transfer ids, the same in all processes of the run.
          count: number of the packet among all packets of all steps, in order.
          source: index of the sending process.
          target: index of the receiving process.
        """
        between = (source << 20) + target + 1
        mixed = self._tag ^ base ^ (_STRIDE * between) ^ (_STRIDE * count << 8)
        return mixed & MASK

    @cached_property
    def between(self) -> list[tuple[int, int]]:
        """Pairs of processes, (source, target)."""
        found = {
            (a.process_index, b.process_index)
            for move in self.moves
            for a, b, _ in move.routes
        }
        return sorted(found)

    def parts(self, arrays: Sequence[Any], source: int, target: int) -> list[Any]:
        """Return the parts that go from one process to another; of PRNG keys, data."""
        return [
            jax.random.key_data(part) if move.is_key else part
            for move, x in zip(self.moves, arrays, strict=True)
            for part in move.parts(x, move.between(source, target))
        ]


class TransferPort:
    """This process's end of all transfers.

    Args:
      server: server of `jax.experimental.transfer`.
      addresses: process → address of its server, for the other processes.
      base: base of transfer ids, the same in all processes of the run.
    """

    def __init__(self, server: Any, addresses: dict[int, str], base: int) -> None:
        self._server, self._addresses, self._base = server, addresses, base
        self._connections: dict[int, Any] = {}
        self.me = jax.process_index()

    def give(self, packet: Packet, arrays: Sequence[Any], n: int) -> None:
        """Offer the values to the other processes; parts for this one are not sent."""
        for source, target in packet.between:
            if source == self.me != target:
                number = packet.number(self._base, n, source, target)
                parts = arrays
                if not packet.is_whole:
                    parts = packet.parts(arrays, source, target)
                self._server.await_pull(number, list(parts))

    def take(self, packet: Packet, arrays: Sequence[Any], n: int) -> list[Any]:
        """Receive the values on this process's devices of the target.

        Args:
          packet: the values.
          arrays: the values on their source; anything for those that are not here.
          n: number of the packet.
        """
        if packet.is_whole and packet.between[0][0] != self.me:
            return self._pull(packet, packet.between[0][0], n, packet.shapes)
        got: list[dict[Any, Any]] = [{} for _ in packet.moves]
        for source, target in packet.between:
            if target != self.me:
                continue
            wanted = [
                (shards, move, b)
                for shards, move in zip(got, packet.moves, strict=True)
                for _, b, _ in move.between(source, target)
            ]
            if source == self.me:
                parts = packet.parts(arrays, source, target)
                found = jax.device_put(parts, [b for _, _, b in wanted])
            else:
                shapes = [_shape_of_part(move, b) for _, move, b in wanted]
                found = self._pull(packet, source, n, shapes)
            for (shards, move, b), x in zip(wanted, found, strict=True):
                impl = impl_of(str(move.aval.dtype)) if move.is_key else None
                shards[b] = jax.random.wrap_key_data(x, impl=impl) if impl else x
        return [
            assembled(move.aval, move.target, [shards[d] for d in here(move.target)])
            for move, shards in zip(packet.moves, got, strict=True)
        ]

    def _pull(
        self, packet: Packet, source: int, n: int, shapes: Sequence[Any]
    ) -> list[Any]:
        if source not in self._connections:
            address = self._addresses[source]
            self._connections[source] = self._server.connect(address)
        number = packet.number(self._base, n, source, self.me)
        return list(self._connections[source].pull(number, shapes))


def _shape_of_part(move: MeshMove, device: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = move.target.shard_shape(tuple(move.aval.shape)), move.aval.dtype
    if move.is_key:
        data = jax.eval_shape(
            jax.random.key_data, jax.ShapeDtypeStruct(shape, move.aval.dtype)
        )
        shape, dtype = data.shape, data.dtype
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))


_servers: dict[int, Any] = {}


def server_of(client: Any, host: str) -> Any:
    """Return the transfer server of this process, at an address that others can reach.

    Args:
      client: client of the devices.
      host: address of this process.
    """
    if id(client) not in _servers:
        _servers[id(client)] = transfer.start_transfer_server(
            client, f"{host}:0", [f"{host}:0"]
        )
    return _servers[id(client)]


HEARD_S = 2.0
"""Seconds to wait for another process's error before this process reports its own."""


SHOWN = -1
"""Target of results that are replicated over all processes."""


@dataclass(eq=False)
class Exchange:
    """This process's part in all transfers between submeshes.

    Every process calls the same methods in the same order, also where it has no part.

    Attributes:
      step: all tasks.
      programs: programs of every submesh.
      is_emulated: see `Controller`.
      running: communication of the processes while they run.
      port: sends values to other processes and receives theirs.
      on: indices of the processes of every submesh.
      mine: whether this process is one of them, for every submesh.
      arriving: values from other processes that were not awaited yet.
    """

    step: StagedStep
    programs: Sequence[GroupPrograms]
    is_emulated: bool
    running: Running
    port: TransferPort
    on: list[list[int]] = field(init=False)
    mine: list[bool] = field(init=False)
    arriving: dict[int, tuple[Any, Sequence[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        meshes = [p.mesh.devices.flat for p in self.programs]
        self.on = [sorted({d.process_index for d in mesh}) for mesh in meshes]
        self.mine = [self.running.me in on for on in self.on]
        self._packets: dict[Any, Packet] = {}
        self._relaid = Relaid()
        self._sent = 0

    def begin(self) -> None:
        """Enter the next step."""
        self.running.begin()
        self._sent = 0

    def move(self, way: Way, arrays: Sequence[Any]) -> Sequence[Any]:
        """Move values between submeshes; None in processes outside of the target."""
        want = [self.programs[way.target].shardings[k] for k in way.keys]
        packet, arrays = self._laid_out(way, want, arrays)
        if self.on[way.source] == self.on[way.target] == [self.running.me]:
            return [m.here(x) for m, x in zip(packet.moves, arrays, strict=True)]
        return self._carry(packet, arrays, way.source, self.mine[way.target])

    def _carry(
        self, packet: Packet, arrays: Sequence[Any], source: int, is_target: bool
    ) -> Sequence[Any]:
        number = (self.running.step << 24) + self._sent
        if self.mine[source]:
            self.port.give(packet, arrays, number)
        if not is_target:
            return [None] * len(arrays)
        taken = self.port.take(packet, arrays, number)
        self.arriving |= {id(x): (x, self.on[source]) for x in taken}
        return taken

    def meet(self, group: int, doing: str) -> None:
        """Wait until all processes of a submesh are ready to run its next task.

        On emulated devices only: a collective that waits for another process blocks a
        thread of XLA's pool there, and when as many as there are cores are blocked
        nothing is sent any more, maybe not even what the other process waits for.
        """
        if self.is_emulated and len(self.on[group]) > 1:
            self.running.meet(doing, self.on[group])

    def arrived(self, x: Any, doing: str) -> None:
        """Wait for a value if it comes from another process."""
        x, on = self.arriving.pop(id(x), (None, ()))
        if x is None:
            return
        try:
            # Arrays of PRNG keys have no `is_ready`.
            if getattr(x, "is_ready", bool)():
                jax.block_until_ready(x)
            else:
                self.running.wait(partial(jax.block_until_ready, x), on, doing)
        except jax.errors.JaxRuntimeError as error:
            others = [p for p in on if p != self.running.me]
            told = self.running.reported_within(HEARD_S)
            text = first_line(error)
            raise told or self.running.watch.lost(others[0], doing, text) from error

    def _laid_out(
        self, way: Way, want: Sequence[NamedSharding], arrays: Sequence[Any]
    ) -> tuple[Packet, list[Any]]:
        """Plan a packet, and reshard its values on their submesh as they leave it."""
        at, types = way[:3], self.step.types
        if at not in self._packets:
            self._packets[at] = Packet(
                tuple(
                    MeshMove.of(k.label, types[k], leaving(a, b, types[k].shape), b)
                    for k, a, b in zip(way.keys, way.have, want, strict=True)
                )
            )
        self._sent += 1
        group, doing, found = way.source, "to lay out what is sent", list(arrays)
        for i, move in enumerate(self._packets[at].moves):
            if self.mine[group] and way.have[i] != move.source:
                self.meet(group, doing)
                found[i] = self._relaid(arrays[i], way.have[i], move.source)
                if self.is_emulated:
                    done = partial(jax.block_until_ready, found[i])
                    self.running.wait(done, self.on[group], doing)
        return self._packets[at], found

    def show(self, x: Any, group: int, key: ValueKey, sharding: NamedSharding) -> Any:
        """Replicate a result of one submesh over all processes."""
        aval, of = self.step.types[key], self.programs[group]
        heads = {d.process_index: d for d in reversed(list(sharding.mesh.devices.flat))}
        mesh = jax.sharding.Mesh(np.array([heads[p] for p in sorted(heads)]), "process")
        target = NamedSharding(mesh, PartitionSpec())
        way = Way(group, SHOWN, (key,), [of.shardings[key]])
        packet, arrays = self._laid_out(way, [target], [x])
        (on_head,) = self._carry(packet, arrays, group, is_target=True)
        self.arrived(on_head, "for a result of the step")
        (one,) = (s.data for s in on_head.addressable_shards)
        devices = here(sharding)
        return assembled(aval, sharding, jax.device_put([one] * len(devices), devices))
