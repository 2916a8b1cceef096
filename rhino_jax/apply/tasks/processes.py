"""Dispatches the tasks of a step where its groups are several processes'.

Every process goes through all tasks in one order, runs those of the groups in which it
has devices, and takes part in the transfers that these need. A step is all or nothing:
state is donated only after all processes have run all that comes before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rhino_jax._compat import context_mesh
from rhino_jax.apply.across import assembled, away, here, placed
from rhino_jax.apply.tasks.controller import Controller
from rhino_jax.apply.tasks.transfers import Move, Packet, Port
from rhino_jax.errors import ProcessError
from rhino_jax.processes.running import Running
from rhino_jax.transform.staged.step import Key, Kind, Send, TaskKind


AHEAD = 4
"""Tasks that a process may have dispatched and not seen end: enough that a device never
waits for the host (two are, with tasks of 5 ms), and few whose values wait for room."""

HEARD_S = 2.0
"""Seconds in which another process that failed tells, before this one names itself."""

Place = tuple[TaskKind, int, int]


@dataclass(eq=False)
class ProcessController(Controller):
    """Runs steps over several processes.

    Attributes:
      running: what the processes tell each other.
      port: for values that come from others, or go to them.
      base: of the numbers of transfers.
      shown: results that all processes get: result → its sharding.
      name: of the function.
    """

    running: Running = field(kw_only=True)
    port: Port = field(kw_only=True)
    base: int = field(kw_only=True)
    shown: dict[int, NamedSharding] = field(kw_only=True)
    name: str = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        me = jax.process_index()
        self._on = [
            sorted({d.process_index for d in p.mesh.devices.flat})
            for p in self.programs
        ]
        self._mine = [me in on for on in self._on]
        self._replaced: dict[Place, Sequence[Key]] = {
            place: p.replaced(i) for place, (p, i) in self._at.items()
        }
        self._gone: list[Key] = []
        self._packets: dict[Any, Packet] = {}
        self._resharded: dict[Any, Any] = {}
        self._sent = 0
        self._before: deque[tuple[str, Sequence[int], Any]] = deque()
        self._arriving: dict[int, tuple[Any, Sequence[int]]] = {}
        self._is_committed = False
        self._task = ""

    # The step.

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """One step, in all processes.

        Args:
          arrays: its inputs; those whose home is elsewhere are not read.
        Raises:
          ProcessError: a task failed, or a process is lost; in every process.
        """
        self.running.begin()
        self._sent, self._is_committed, self._task = 0, False, "the start"
        self._gone.clear()
        try:
            found = self._whole(super().run(arrays))
            if not self._is_committed:
                self._commit()
            self._wait_for_all()
            for key in self._gone:
                # As where it was: a donated array is of no use any more.
                arrays[key.number].delete()
        except Exception as error:
            told = self._failed(error)
            self.running.failed(told)
            raise told from (None if told is error else error)
        finally:
            self._before.clear()
            self._arriving.clear()
        return found

    def _whole(self, results: Sequence[Any]) -> list[Any]:
        """Results as every process has them."""
        found = []
        for i, (x, output) in enumerate(zip(results, self.step.outputs, strict=True)):
            if i in self.shown and isinstance(output, tuple):
                group, key = output
                x = self._show(x, group, key, self.shown[i])
            elif i in self.shown:
                (x,) = placed([np.asarray(output)], [self.shown[i]])
            found.append(x)
        return found

    def _result(self, output: Any, once: Sequence[dict[Key, Any]], arrays: Any) -> Any:
        if not isinstance(output, tuple):
            return placed([np.asarray(output)], [self.programs[0].everywhere])[0]
        group, key = output
        if key.kind is Kind.INPUT:
            return arrays[key.number]
        if self._mine[group]:
            return once[group][key]
        return away(self.step.types[key], self.programs[group].shardings[key])

    def _commit(self) -> None:
        """From here on state is replaced: nobody may have failed before."""
        self._wait_for_all()
        self._task = "the end of the micro-batches"
        self.running.meet("at the end of the micro-batches")
        self._is_committed = True

    # Tasks.

    def _dispatch(
        self,
        place: Place,
        now: Sequence[dict[Key, Any]],
        once: Sequence[dict[Key, Any]],
    ) -> None:
        found = self._at.get(place)
        if found is None:
            return
        programs, position = found
        task, group = programs.of.tasks[position], programs.group
        replaced = self._replaced.get(place, ())
        if replaced and not self._is_committed:
            self._commit()
        if not self._mine[group]:
            self._gone += replaced
        if self._mine[group]:
            mine, now_here = once[group], now[group]
            reads = [now_here[k] if k in now_here else mine[k] for k in task.reads]
            for x in reads:
                self._arrived(x, f"for what `{task.name}` reads")
            self._task = task.name
            with self._context(programs.mesh):
                results = programs.all[position](*reads)
            for key, x in zip(task.makes, results, strict=True):
                (now_here if key.kind is Kind.INSIDE else mine)[key] = x
            self._dispatched(task.name, group, results)
        sends = self._sends.get(place, ())
        self._send([s for s in sends if s.key.kind is not Kind.SUM], now, once)

    def _dispatched(self, name: str, group: int, results: Sequence[Any]) -> None:
        if self.is_emulated:
            self._wait(results, self._on[group], name)
            return
        if results:
            # What is smallest stands for all: it is held a little longer.
            least = min(results, key=lambda x: x.nbytes)
            self._before.append((name, self._on[group], least))
        while len(self._before) > AHEAD:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        name, on, x = self._before.popleft()
        if not x.is_deleted():
            self._wait([x], on, name)

    def _wait_for_all(self) -> None:
        while self._before:
            self._wait_for_first()
        for x, _ in list(self._arriving.values()):
            self._arrived(x, f"after `{self._task}`")

    def _wait(self, arrays: Sequence[Any], on: Sequence[int], name: str) -> None:
        """Wait for what a task makes; its errors are those of this task."""
        self._task = name
        if len(on) < 2:
            jax.block_until_ready(arrays)
            return
        doing = f"in `{name}`"
        try:
            self.running.wait(partial(jax.block_until_ready, arrays), on, doing)
        except jax.errors.JaxRuntimeError:
            # Where another of the group has failed, that is the cause.
            told = self.running.told_within(HEARD_S)
            if told is not None:
                raise told from None
            raise

    def _arrived(self, x: Any, doing: str) -> None:
        """Wait for a value if it comes from another process."""
        x, on = self._arriving.pop(id(x), (None, ()))
        if x is None:
            return
        try:
            if x.is_ready():
                jax.block_until_ready(x)
            else:
                self.running.wait(partial(jax.block_until_ready, x), on, doing)
        except jax.errors.JaxRuntimeError as error:
            others = [p for p in on if p != self.running.me]
            told = self.running.told_within(HEARD_S)
            text = str(error).splitlines()[0][:300]
            raise told or self.running.lost(others[0], doing, text) from error

    # Transfers.

    def _inputs(self, group: int, arrays: Sequence[Any]) -> dict[Key, Any]:
        keys, home = self.step.inputs(group), self.step.home
        found = {k: arrays[k.number] for k in keys if home[k.number] == group}
        shardings = self.programs[group].shardings
        for source in range(self.step.groups):
            away_keys = [k for k in keys if home[k.number] == source != group]
            if away_keys:
                given = [
                    arrays[k.number] if self._mine[source] else None for k in away_keys
                ]
                have = [arrays[k.number].sharding for k in away_keys]
                want = [shardings[k] for k in away_keys]
                moved = self._move(source, group, away_keys, given, have, want)
                found |= dict(zip(away_keys, moved, strict=True))
        return found

    def _number(self, group: int, m: int) -> Any:
        if not self._mine[group]:
            return None
        if (group, m) not in self._numbers:
            where = self.programs[group].shardings.get(
                Key(Kind.PIECE), self.programs[group].everywhere
            )
            (self._numbers[group, m],) = placed([np.int32(m)], [where])
        return self._numbers[group, m]

    def _send(
        self,
        sends: Sequence[Send],
        now: Sequence[dict[Key, Any]],
        once: Sequence[dict[Key, Any]],
    ) -> None:
        ways = dict.fromkeys((s.source, s.target) for s in sends)
        for source, target in ways:
            keys = [s.key for s in sends if (s.source, s.target) == (source, target)]
            envs = [now if k.kind is Kind.INSIDE else once for k in keys]
            given = [e[source].get(k) for e, k in zip(envs, keys, strict=True)]
            have = [self.programs[source].shardings[k] for k in keys]
            want = [self.programs[target].shardings[k] for k in keys]
            moved = self._move(source, target, keys, given, have, want)
            for env, key, x in zip(envs, keys, moved, strict=True):
                if x is not None:
                    env[target][key] = x

    def _move(
        self,
        source: int,
        target: int,
        keys: Sequence[Key],
        arrays: Sequence[Any],
        have: Sequence[NamedSharding],
        want: Sequence[NamedSharding],
    ) -> Sequence[Any]:
        """Values from group to group; None in processes outside of the target."""
        laid_out = [
            self._laid_out(x, source, a, b)
            for x, a, b in zip(arrays, have, want, strict=True)
        ]
        if self._on[source] == self._on[target] == [self.running.me]:
            return list(jax.device_put([x for x, _ in laid_out], list(want)))
        found = self._packets.get((source, target, *keys))
        if found is None:
            found = Packet(
                tuple(
                    Move.of(f"{k.kind} {k.number}", self.step.types[k], a, b)
                    for k, (_, a), b in zip(keys, laid_out, want, strict=True)
                )
            )
            self._packets[source, target, *keys] = found
        return self._carry(found, [x for x, _ in laid_out], source, self._mine[target])

    def _carry(
        self, packet: Packet, arrays: Sequence[Any], source: int, is_target: bool
    ) -> Sequence[Any]:
        self._sent += 1
        number = (self.running.step << 24) + self._sent
        if self._mine[source]:
            self.port.give(packet, arrays, self.base, number)
        if not is_target:
            return [None] * len(arrays)
        taken = self.port.take(packet, arrays, self.base, number)
        self._arriving |= {id(x): (x, self._on[source]) for x in taken}
        return taken

    def _laid_out(
        self, x: Any, group: int, have: NamedSharding, want: NamedSharding
    ) -> tuple[Any, NamedSharding]:
        """A value on its group as another group wants it."""
        if have.spec == want.spec:
            return x, have
        here_as = NamedSharding(have.mesh, want.spec)
        if not self._mine[group]:
            return x, here_as
        key = have, here_as
        if key not in self._resharded:
            self._resharded[key] = jax.jit(_same, out_shardings=here_as)
        with self._context(have.mesh):
            x = self._resharded[key](x)
        if self.is_emulated:
            self._wait([x], self._on[group], "reshard")
        return x, here_as

    def _show(self, x: Any, group: int, key: Key, sharding: NamedSharding) -> Any:
        """A result of one group in all processes."""
        aval, of = self.step.types[key], self.programs[group]
        x, have = self._laid_out(x, group, of.shardings[key], of.everywhere)
        heads = {d.process_index: d for d in reversed(list(sharding.mesh.devices.flat))}
        mesh = jax.sharding.Mesh(np.array([heads[p] for p in sorted(heads)]), "process")
        target = NamedSharding(mesh, PartitionSpec())
        packet = self._packets.get(("shown", key))
        if packet is None:
            packet = Packet((Move.of(f"shown {key.number}", aval, have, target),))
            self._packets["shown", key] = packet
        (on_head,) = self._carry(packet, [x], group, is_target=True)
        self._arrived(on_head, "for a result of the step")
        (one,) = (s.data for s in on_head.addressable_shards)
        devices = here(sharding)
        return assembled(aval, sharding, jax.device_put([one] * len(devices), devices))

    def _context(self, mesh: Any) -> Any:
        """A mesh that the user has set is of all devices."""
        return jax.set_mesh(mesh) if context_mesh() else nullcontext()

    # What goes wrong.

    def _failed(self, error: Exception) -> ProcessError:
        """What is raised in this process, and told to the others."""
        if isinstance(error, ProcessError):
            return error
        me = self.running.me
        state = (
            "State was being replaced: restart from the last checkpoint."
            if self._is_committed
            else "State is as it was before the step."
        )
        return ProcessError(
            f"{self.running.what}: `{self._task}` of `{self.name}` failed in process"
            f" {me}. {state}",
            where=f"process {me}, step {self.running.step}, task `{self._task}`",
            numbers=f"{type(error).__name__}: {error}"[:1000],
            fix=f"see the output of process {me}.",
        )


def _same(x: Any) -> Any:
    return x
