"""Dispatch the tasks of a step whose submeshes span several processes.

Every process iterates over all tasks in one order, runs those of the submeshes in which
it has devices, and takes part in the transfers that these need. A step is atomic: state
is donated only after all processes have run all tasks before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from rhino_jax.errors import ProcessError
from rhino_jax.passes.staged.step import TaskKind, TaskSend, ValueKey, ValueKind
from rhino_jax.runtime.processes.across import away, placed
from rhino_jax.runtime.tasks.controller import Controller
from rhino_jax.runtime.tasks.exchange import HEARD_S, Exchange
from rhino_jax.runtime.tasks.moves import in_mesh


AHEAD = 4
"""Tasks that a process may have dispatched before they end.

One runs, the next is queued behind it, and two more cover short ones. Their results
allocate memory ahead of time.
"""

Place = tuple[TaskKind, int, int]


@dataclass(eq=False)
class ProcessController(Controller):
    """Runs steps over several processes.

    Attributes:
      exchange: transfers values between submeshes.
      shown: sharding of each result that is replicated over all processes.
      name: name of the function.
    """

    exchange: Exchange = field(kw_only=True)
    shown: dict[int, NamedSharding] = field(kw_only=True)
    name: str = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.running = self.exchange.running
        self._replaced: dict[Place, Sequence[ValueKey]] = {
            place: p.replaced(i) for place, (p, i) in self._at.items()
        }
        self._per_task = {
            place: [s for s in sends if s.key.kind is not ValueKind.SUM]
            for place, sends in self._sends.items()
        }
        self._gone: list[ValueKey] = []
        self._before: deque[tuple[str, Sequence[int], Any]] = deque()
        self._is_committed = False

    # The step.

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Run one step in all processes.

        Args:
          arrays: the step's inputs; those whose home is elsewhere are not read.
        Raises:
          ProcessError: a task failed, or a process is lost; in every process.
        """
        self.exchange.begin()
        self._is_committed = False
        self._gone.clear()
        try:
            found = self._whole(self._run(arrays))
            if not self._is_committed:
                self._commit()
            self._wait_for_all()
            for key in self._gone:
                # Donated in another process: deleted here, too.
                arrays[key.number].delete()
        except Exception as error:
            told = self._failed(error)
            self.running.failed(told)
            raise told from (None if told is error else error)
        finally:
            self._before.clear()
            self.exchange.arriving.clear()
        return found

    def _whole(self, results: Sequence[Any]) -> list[Any]:
        """Return the results, with those in `shown` replicated over all processes."""
        found = []
        for i, (x, output) in enumerate(zip(results, self.step.outputs, strict=True)):
            if i in self.shown and isinstance(output, tuple):
                group, key = output
                x = self.exchange.show(x, group, key, self.shown[i])
            elif i in self.shown:
                (x,) = placed([np.asarray(output)], [self.shown[i]])
            found.append(x)
        return found

    def _result(
        self, output: Any, once: Sequence[dict[ValueKey, Any]], arrays: Any
    ) -> Any:
        if not isinstance(output, tuple):
            return placed([np.asarray(output)], [self.programs[0].everywhere])[0]
        group, key = output
        if key.kind is ValueKind.INPUT:
            return arrays[key.number]
        if self.exchange.mine[group]:
            return once[group][key]
        return away(self.step.types[key], self.programs[group].shardings[key])

    def _commit(self) -> None:
        """Wait until all processes have run all tasks before state is replaced.

        No process may have failed before; from here on, state is replaced.
        """
        self._wait_for_all()
        self._task = "the end of the micro-batches"
        self.running.meet("at the end of the micro-batches")
        self._is_committed = True

    # Tasks.

    def _dispatch(
        self,
        place: Place,
        now: Sequence[dict[ValueKey, Any]],
        once: Sequence[dict[ValueKey, Any]],
    ) -> None:
        found = self._at.get(place)
        if found is None:
            return
        programs, position = found
        task, group = programs.of.tasks[position], programs.group
        replaced = self._replaced.get(place, ())
        if replaced and not self._is_committed:
            self._commit()
        if not self.exchange.mine[group]:
            self._gone += replaced
        if self.exchange.mine[group]:
            mine, now_here = once[group], now[group]
            reads = [now_here[k] if k in now_here else mine[k] for k in task.reads]
            name = self._names[place]
            arriving = self.exchange.arriving
            if arriving:
                for x in reads:
                    if id(x) in arriving:
                        self.exchange.arrived(x, f"for what `{name}` reads")
            self._task = name
            self.exchange.meet(group, f"in `{name}`")
            with in_mesh(programs.mesh):
                results = programs.all[position](*reads)
            for key, x in zip(task.makes, results, strict=True):
                (now_here if key.kind is ValueKind.INSIDE else mine)[key] = x
            self._dispatched(name, group, results)
        sends = self._per_task.get(place)
        if sends:
            self._send(sends, now, once)

    def _dispatched(self, name: str, group: int, results: Sequence[Any]) -> None:
        if self.is_emulated:
            self._wait(results, self.exchange.on[group], name)
            return
        if results:
            # The last result stands for all: only its buffer stays live a bit longer.
            self._before.append((name, self.exchange.on[group], results[-1]))
        while len(self._before) > AHEAD:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        name, on, x = self._before.popleft()
        if not x.is_deleted():
            self._wait([x], on, name)

    def _wait_for_all(self) -> None:
        while self._before:
            self._wait_for_first()
        for x, _ in list(self.exchange.arriving.values()):
            self.exchange.arrived(x, f"after `{self._task}`")

    def _wait(self, arrays: Sequence[Any], on: Sequence[int], name: str) -> None:
        """Wait for the results of a task, and attribute errors to it."""
        self._task = name
        if len(on) < 2:
            jax.block_until_ready(arrays)
            return
        doing = f"in `{name}`"
        try:
            self.running.wait(partial(jax.block_until_ready, arrays), on, doing)
        except jax.errors.JaxRuntimeError:
            # If another process of the submesh has failed, that is the cause.
            told = self.running.told_within(HEARD_S)
            if told is not None:
                raise told from None
            raise

    # Transfers.

    def _inputs(self, group: int, arrays: Sequence[Any]) -> dict[ValueKey, Any]:
        keys, home = self.step.inputs(group), self.step.home
        found = {k: arrays[k.number] for k in keys if home[k.number] == group}
        shardings = self.programs[group].shardings
        for source in range(self.step.groups):
            away_keys = [k for k in keys if home[k.number] == source != group]
            if away_keys:
                given = [
                    arrays[k.number] if self.exchange.mine[source] else None
                    for k in away_keys
                ]
                have = [arrays[k.number].sharding for k in away_keys]
                want = [shardings[k] for k in away_keys]
                moved = self.exchange.move(source, group, away_keys, given, have, want)
                found |= dict(zip(away_keys, moved, strict=True))
        return found

    def _number(self, group: int, m: int) -> Any:
        if not self.exchange.mine[group]:
            return None
        if (group, m) not in self._numbers:
            where = self.programs[group].shardings.get(
                ValueKey(ValueKind.PIECE), self.programs[group].everywhere
            )
            (self._numbers[group, m],) = placed([np.int32(m)], [where])
        return self._numbers[group, m]

    def _send(
        self,
        sends: Sequence[TaskSend],
        now: Sequence[dict[ValueKey, Any]],
        once: Sequence[dict[ValueKey, Any]],
    ) -> None:
        for way in self.exchange.ways_of(sends):
            source, target, keys, have, want = way
            envs = [now if k.kind is ValueKind.INSIDE else once for k in keys]
            given = [e[source].get(k) for e, k in zip(envs, keys, strict=True)]
            moved = self.exchange.move(source, target, keys, given, have, want)
            for env, key, x in zip(envs, keys, moved, strict=True):
                if x is not None:
                    env[target][key] = x

    # What goes wrong.

    def _failed(self, error: Exception) -> ProcessError:
        """Return the error that this process raises and reports to the others."""
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
