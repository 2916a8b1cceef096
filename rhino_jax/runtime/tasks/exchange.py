"""Send values between submeshes that span several processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rhino_jax.passes.staged.step import StagedStep, TaskSend, ValueKey
from rhino_jax.runtime.processes.across import assembled, here
from rhino_jax.runtime.processes.running import Running
from rhino_jax.runtime.tasks.moves import MeshMove, Relaid, leaving
from rhino_jax.runtime.tasks.programs import GroupPrograms
from rhino_jax.runtime.tasks.transfers import Packet, TransferPort


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
            raise told or self.running.lost(others[0], doing, text) from error

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
