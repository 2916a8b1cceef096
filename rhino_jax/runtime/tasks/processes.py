"""Dispatches the tasks of a step where its groups are several processes'.

Every process goes through all tasks in one order, runs those of the groups in which it
has devices, and takes part in the transfers that these need. A step is all or nothing:
state is donated only after all processes have run all that comes before.
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
"""Tasks that a process may have dispatched and not seen end: one runs, the next waits
behind it, and two for what is short. What these make takes room ahead of its time."""

Place = tuple[TaskKind, int, int]


@dataclass(eq=False)
class ProcessController(Controller):
    """Runs steps over several processes.

    Attributes:
      exchange: of values between groups.
      shown: results that all processes get: result → its sharding.
      name: of the function.
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
        """One step, in all processes.

        Args:
          arrays: its inputs; those whose home is elsewhere are not read.
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
                # As where it was: a donated array is of no use any more.
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
        """Results as every process has them."""
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
        """From here on state is replaced: nobody may have failed before."""
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
            # The last stands for all: it is held a little longer.
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
