"""Transfer values to submeshes of other processes.

Both sides compute the id of a transfer from its contents (values, shapes, dtypes,
shards, devices), the step, and its position in the step's order. So transfers that
differ between two processes never match, but time out. Runs on
`jax.experimental.transfer`: asynchronous, and in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from rhino_jax.runtime.placing import impl_of
from rhino_jax.runtime.processes.across import assembled, here
from rhino_jax.runtime.tasks.moves import MeshMove, part_of, shards_of


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
