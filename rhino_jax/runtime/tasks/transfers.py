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

from rhino_jax.passes.staged.step import StagedStep, TaskSend, ValueKey
from rhino_jax.runtime.placing import impl_of
from rhino_jax.runtime.processes.across import assembled, here
from rhino_jax.runtime.processes.running import Running
from rhino_jax.runtime.tasks.moves import MeshMove, Relaid, leaving, part_of, shards_of
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
            for a, b in move.pairs
        }
        return sorted(found)


class TransferPort:
    """This process's end of all transfers.

    Args:
      server: server of `jax.experimental.transfer`.
      addresses: process → address of its server, for the other processes.
    """

    def __init__(self, server: Any, addresses: dict[int, str]) -> None:
        self._server, self._addresses = server, addresses
        self._connections: dict[int, Any] = {}
        self.me = jax.process_index()

    def give(self, packet: Packet, arrays: Sequence[Any], base: int, n: int) -> None:
        """Offer the values to the other processes; parts for this one are not sent."""
        for source, target in packet.between:
            if source != self.me or target == self.me:
                continue
            if packet.is_whole:
                number = packet.number(base, n, source, target)
                self._server.await_pull(number, list(arrays))
                continue
            parts = []
            for move, x in zip(packet.moves, arrays, strict=True):
                shards = shards_of(x)
                for a, _, piece in move.between(source, target):
                    part = part_of(shards[a], piece)
                    parts.append(jax.random.key_data(part) if move.is_key else part)
            self._server.await_pull(packet.number(base, n, source, target), parts)

    def take(
        self, packet: Packet, arrays: Sequence[Any], base: int, n: int
    ) -> list[Any]:
        """Receive the values on this process's devices of the target.

        Args:
          packet: the values.
          arrays: the values on their source; anything for those that are not here.
          base: base of transfer ids.
          n: number of the packet.
        """
        if packet.is_whole and packet.between[0][0] != self.me:
            ((source, _),) = packet.between
            number = packet.number(base, n, source, self.me)
            return list(self._peer(source).pull(number, packet.shapes))
        got: list[dict[Any, Any]] = [{} for _ in packet.moves]
        for source, target in packet.between:
            if target != self.me:
                continue
            if source == self.me:
                for parts, move, x in zip(got, packet.moves, arrays, strict=True):
                    shards, pairs = shards_of(x), move.between(source, target)
                    into = [b for _, b, _ in pairs]
                    moved = jax.device_put(
                        [part_of(shards[a], piece) for a, _, piece in pairs], into
                    )
                    parts |= dict(zip(into, moved, strict=True))
                continue
            number = packet.number(base, n, source, target)
            self._pull(packet, source, number, got)
        return [
            assembled(move.aval, move.target, [parts[d] for d in here(move.target)])
            for move, parts in zip(packet.moves, got, strict=True)
        ]

    def _peer(self, process: int) -> Any:
        if process not in self._connections:
            address = self._addresses[process]
            self._connections[process] = self._server.connect(address)
        return self._connections[process]

    def _pull(
        self, packet: Packet, source: int, number: int, got: list[dict[Any, Any]]
    ) -> None:
        wanted = [
            (parts, move, b)
            for parts, move in zip(got, packet.moves, strict=True)
            for _, b, _ in move.between(source, self.me)
        ]
        shapes = [_shape_of_part(move, b) for _, move, b in wanted]
        pulled = self._peer(source).pull(number, shapes)
        for (parts, move, b), x in zip(wanted, pulled, strict=True):
            if move.is_key:
                impl = impl_of(str(move.aval.dtype))
                x = jax.random.wrap_key_data(x, impl=impl)
            parts[b] = x


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

Way = tuple[int, int, tuple[ValueKey, ...], list[NamedSharding], list[NamedSharding]]
"""Source, target, value keys, and their shardings on each."""


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
      base: base of transfer ids, the same in all processes of the run.
      on: indices of the processes of every submesh.
      mine: whether this process is one of them, for every submesh.
      arriving: values from other processes that were not awaited yet.
    """

    step: StagedStep
    programs: Sequence[GroupPrograms]
    is_emulated: bool
    running: Running
    port: TransferPort
    base: int
    on: list[list[int]] = field(init=False)
    mine: list[bool] = field(init=False)
    arriving: dict[int, tuple[Any, Sequence[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        meshes = [p.mesh.devices.flat for p in self.programs]
        self.on = [sorted({d.process_index for d in mesh}) for mesh in meshes]
        self.mine = [self.running.me in on for on in self.on]
        self._ways: dict[Any, list[Way]] = {}
        self._packets: dict[Any, Packet] = {}
        self._relaid = Relaid()
        self._sent = 0

    def begin(self) -> None:
        """Enter the next step."""
        self.running.begin()
        self._sent = 0

    def ways_of(self, sends: Sequence[TaskSend]) -> list[Way]:
        """Group sends by source and target, with the shardings on each."""
        if not sends:
            return []
        key = sends[0], len(sends)
        if key not in self._ways:
            keys: dict[tuple[int, int], list[ValueKey]] = {}
            for s in sends:
                keys.setdefault((s.source, s.target), []).append(s.key)
            of = self.programs
            self._ways[key] = [
                (
                    source,
                    target,
                    tuple(sent),
                    [of[source].shardings[k] for k in sent],
                    [of[target].shardings[k] for k in sent],
                )
                for (source, target), sent in keys.items()
            ]
        return self._ways[key]

    def move(
        self,
        source: int,
        target: int,
        keys: Sequence[ValueKey],
        arrays: Sequence[Any],
        have: Sequence[NamedSharding],
        want: Sequence[NamedSharding],
    ) -> Sequence[Any]:
        """Move values between submeshes; None in processes outside of the target."""
        laid_out = [
            self._laid_out(x, source, a, leaving(a, b, self.step.types[key].shape))
            for key, x, a, b in zip(keys, arrays, have, want, strict=True)
        ]
        self._sent += 1
        found = self._packets.get((source, target, *keys))
        if found is None:
            found = Packet(
                tuple(
                    MeshMove.of(f"{k.kind} {k.number}", self.step.types[k], a, b)
                    for k, (_, a), b in zip(keys, laid_out, want, strict=True)
                )
            )
            self._packets[source, target, *keys] = found
        if self.on[source] == self.on[target] == [self.running.me]:
            moves = zip(found.moves, laid_out, strict=True)
            return [move.here(x) for move, (x, _) in moves]
        return self._carry(found, [x for x, _ in laid_out], source, self.mine[target])

    def _carry(
        self, packet: Packet, arrays: Sequence[Any], source: int, is_target: bool
    ) -> Sequence[Any]:
        number = (self.running.step << 24) + self._sent
        if self.mine[source]:
            self.port.give(packet, arrays, self.base, number)
        if not is_target:
            return [None] * len(arrays)
        taken = self.port.take(packet, arrays, self.base, number)
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
            text = str(error).splitlines()[0][:300]
            raise told or self.running.watch.lost(others[0], doing, text) from error

    def _laid_out(
        self, x: Any, group: int, have: NamedSharding, want: NamedSharding
    ) -> tuple[Any, NamedSharding]:
        """Reshard a value on its submesh; return it and its sharding."""
        if self.mine[group] and have != want:
            self.meet(group, "to lay out what is sent")
            x = self._relaid(x, have, want)
            if self.is_emulated:
                done = partial(jax.block_until_ready, x)
                self.running.wait(done, self.on[group], "to lay out what is sent")
        return x, want

    def show(self, x: Any, group: int, key: ValueKey, sharding: NamedSharding) -> Any:
        """Replicate a result of one submesh over all processes."""
        aval, of = self.step.types[key], self.programs[group]
        x, have = self._laid_out(x, group, of.shardings[key], of.everywhere)
        heads = {d.process_index: d for d in reversed(list(sharding.mesh.devices.flat))}
        mesh = jax.sharding.Mesh(np.array([heads[p] for p in sorted(heads)]), "process")
        target = NamedSharding(mesh, PartitionSpec())
        packet = self._packets.get(("shown", key))
        if packet is None:
            packet = Packet((MeshMove.of(f"shown {key.number}", aval, have, target),))
            self._packets["shown", key] = packet
        self._sent += 1
        (on_head,) = self._carry(packet, [x], group, is_target=True)
        self.arrived(on_head, "for a result of the step")
        (one,) = (s.data for s in on_head.addressable_shards)
        devices = here(sharding)
        return assembled(aval, sharding, jax.device_put([one] * len(devices), devices))
