"""Dispatch the tasks of a step in the order of its schedule, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from rhino_jax.hardware.emulated import WATCHDOG
from rhino_jax.passes.staged.step import (
    StagedStep,
    TaskKind,
    TaskSend,
    ValueKey,
    ValueKind,
)
from rhino_jax.pipeline.offload import moved
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import Schedule
from rhino_jax.runtime.processes.across import placed
from rhino_jax.runtime.tasks.moves import (
    MeshMove,
    Relaid,
    in_mesh,
    leaving,
    moved_to,
    on_host,
)
from rhino_jax.runtime.tasks.programs import GroupPrograms


Place = tuple[TaskKind, int, int]
"""Kind, submesh, and chunk or round of a task."""


At = tuple[int, int]
"""Chunk and micro-batch of residuals."""


class Turn(NamedTuple):
    """A task in the dispatch order, and the residuals that are moved around it.

    Attributes:
      kind, chunk, micro_batch: kind, chunk and micro-batch of the task.
      gone: residuals that must be in host memory before the task is dispatched, or
        there is no room; None: no wait.
      goes_out: whether the task's own residuals are offloaded after it.
      back: (residuals to fetch after the task, residuals that must be in host memory
        before).
    """

    kind: TaskKind
    chunk: int
    micro_batch: int
    gone: At | None = None
    goes_out: bool = False
    back: tuple[tuple[At, At], ...] = ()


def order_of(schedule: Schedule, offloaded: Sequence[int] = ()) -> list[Turn]:
    """Return the dispatch order of a step's tasks.

    It has all tasks of micro-batches, and those between forward and backward (of a
    group's first chunk). Each submesh finds its own tasks in schedule order, and every
    task comes after those that it reads. For sequence slices, chunks are those of a
    `Pipeline`: of the first slice, then of the next.

    Args:
      schedule: schedule of the step.
      offloaded: chunks with residuals that are offloaded to host memory; none with
        sequence slices.
    """
    tasks = schedule.graph.tasks
    parts = 1 + max(task.chunk for task in tasks)
    places: list[At] = [(task.chunk, task.micro_batch) for task in tasks]
    gone: dict[int, At | None] = {}
    back: dict[int, list[tuple[At, At]]] = {}
    for move in moved(schedule, offloaded):
        gone[move.forward] = None if move.gone is None else places[move.gone]
        fetched = places[move.forward], places[move.made_room]
        back.setdefault(move.fetched_after, []).append(fetched)
    found = []
    for at in simulate(schedule).sequence:
        if at < len(tasks) and tasks[at].kind is not TaskKind.UPDATE:
            kind, chunk, m, part = tasks[at].key
            kind = TaskKind.BACKWARD if kind is TaskKind.INPUT_GRADIENT else kind
            moves = gone.get(at), at in gone, tuple(back.get(at, ()))
            found.append(Turn(kind, part * parts + chunk, m, *moves))
    return found


@dataclass(eq=False)
class Controller:
    """Runs steps by dispatching their tasks.

    Attributes:
      step: all tasks of the step.
      programs: programs of every submesh.
      order: dispatch order of the tasks of micro-batches.
      is_emulated: whether devices are threads of this process, so that no two
        multi-device programs may run at once: each one is awaited.
    """

    step: StagedStep
    programs: Sequence[GroupPrograms]
    order: Sequence[Turn]
    is_emulated: bool
    _numbers: dict[tuple[int, int], Any] = field(default_factory=dict)
    _moves: dict[Any, MeshMove] = field(default_factory=dict)
    _relaid: Relaid = field(default_factory=Relaid)
    _task: str = "the start"
    _piece: int | None = None

    def __post_init__(self) -> None:
        self._at = {
            (task.kind, task.group, task.place): (p, i)
            for p in self.programs
            for i, task in enumerate(p.of.tasks)
        }
        # Sums are sent once a step, by `_run`.
        self._sends: dict[Place, list[TaskSend]] = {}
        for send in self.step.sends:
            if send.key.kind is not ValueKind.SUM:
                key = send.kind, send.source, send.place
                self._sends.setdefault(key, []).append(send)
        self._unread = self._unread_after()
        self._waiting = {
            (task.group, task.place): [
                k
                for k in (*task.reads, *task.makes)
                if k in self.step.waits_on_host(task.group)
            ]
            for p in self.programs
            for task in p.of.tasks
            if task.kind is TaskKind.FORWARD
        }
        self._names = {k: p.of.tasks[i].name for k, (p, i) in self._at.items()}

    def _unread_after(self) -> list[list[ValueKey]]:
        """Return the values of its micro-batch that are dead after each task."""
        found: list[list[ValueKey]] = []
        seen: dict[tuple[int, int], set[ValueKey]] = {}
        for kind, chunk, m, *_ in reversed(self.order):
            group = self.step.chunks[chunk]
            at = self._at.get((kind, group, chunk))  # None for BETWEEN: frees nothing.
            task = None if at is None else at[0].of.tasks[at[1]]
            keys = () if task is None else (*task.reads, *task.makes)
            later = seen.setdefault((group, m), set())
            found.append(
                [k for k in keys if k.kind is ValueKind.INSIDE and k not in later]
            )
            later.update(found[-1])
        return found[::-1]

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Run one step.

        Args:
          arrays: the step's inputs, each on its home submesh.
        Returns:
          The step's results.
        Raises:
          The error of a task, with a note that names the task and the condition of the
          state.
        """
        try:
            if not self.is_emulated:
                return self._run(arrays)
            with WATCHDOG.watching(lambda: f"`{self._task}` of a step in stages"):
                return self._run(arrays)
        except BaseException as error:  # also where the user interrupts
            # Where the step failed, and which of its arguments are left.
            m, count = self._piece, self.step.micro_batches
            piece = "" if m is None else f", micro-batch {m} of {count} (from 0)"
            gone = sum(x.is_deleted() for x in arrays)
            state = (
                f"State was being replaced; arguments gone: {gone} of {len(arrays)}."
                " Restart from the last checkpoint."
                if gone
                else "All arguments are as they were before it."
            )
            error.add_note(
                f"the step in stages ended in `{self._task}`{piece}. {state}"
            )
            raise

    def _run(self, arrays: Sequence[Any]) -> list[Any]:
        step, self._task, self._piece = self.step, "the start", None
        once: list[dict[ValueKey, Any]] = [
            self._inputs(g, arrays) for g in range(step.groups)
        ]
        pieces: list[list[dict[ValueKey, Any]]] = [
            [
                {ValueKey(ValueKind.PIECE): self._number(g, m)}
                for m in range(step.micro_batches)
            ]
            for g in range(step.groups)
        ]
        for group in range(step.groups):
            self._dispatch((TaskKind.START, group, 0), once, once)
        met = list(step.met)
        for turn, unread in zip(self.order, self._unread, strict=True):
            kind, chunk, m, gone, goes_out, back = turn
            group, now = step.chunks[chunk], [of[m] for of in pieces]
            self._until_gone(pieces[group], group, gone)
            self._piece = None if kind is TaskKind.BETWEEN else m
            if kind is TaskKind.BETWEEN:
                # Sums are sent once, before the first of these tasks.
                self._send(met, once, once)
                met.clear()
                self._dispatch((kind, group, 0), once, once)
            else:
                self._dispatch((kind, group, chunk), now, once)
                for key in unread:
                    now[group].pop(key, None)
            if goes_out:
                self._move(now[group], group, chunk, is_out=True)
            for (other, behind), before in back:
                self._until_gone(pieces[group], group, before)
                self._move(pieces[group][behind], group, other, is_out=False)
        self._piece = None
        # The accumulated sums that updates on other submeshes read.
        sums = (s for s in step.sends if s.key.kind is ValueKind.SUM)
        self._send([send for send in sums if send not in step.met], once, once)
        every = (task for of in step.tasks for task in of)
        rounds = [(t.place, t.group) for t in every if t.kind is TaskKind.UPDATE]
        for place, group in sorted(rounds):
            self._dispatch((TaskKind.UPDATE, group, place), once, once)
        return [self._result(o, once, arrays) for o in step.outputs]

    def _result(
        self, output: Any, once: Sequence[dict[ValueKey, Any]], arrays: Any
    ) -> Any:
        if not isinstance(output, tuple):
            return jax.device_put(output, self.programs[0].everywhere)
        group, key = output
        return arrays[key.number] if key.kind is ValueKind.INPUT else once[group][key]

    def _inputs(self, group: int, arrays: Sequence[Any]) -> dict[ValueKey, Any]:
        keys = self.step.inputs(group)
        found = {
            key: arrays[key.number]
            for key in keys
            if self.step.home[key.number] == group
        }
        for key in keys:
            if key not in found:
                x = arrays[key.number]
                found[key] = self._moved(x, key, x.sharding, group)
        return found

    def _number(self, group: int, m: int) -> Any:
        if (group, m) not in self._numbers:
            where = self.programs[group].shardings.get(
                ValueKey(ValueKind.PIECE), self.programs[group].everywhere
            )
            (self._numbers[group, m],) = placed([np.int32(m)], [where])
        return self._numbers[group, m]

    def _dispatch(
        self,
        place: Place,
        now: Sequence[dict[ValueKey, Any]],
        once: Sequence[dict[ValueKey, Any]],
    ) -> None:
        """Run a task, and send the results that other submeshes read.

        Args:
          place: kind, group, and chunk or round.
          now: values of the micro-batch, per group; or `once`.
          once: values of the step, per group.
        """
        found = self._at.get(place)
        if found is None:
            return
        programs, position = found
        task, group = programs.of.tasks[position], programs.group
        if self._takes_part(place, group):
            mine, here = once[group], now[group]
            arrays = [here[k] if k in here else mine[k] for k in task.reads]
            self._start(place, group, arrays)
            with in_mesh(programs.mesh):
                results = programs.all[position](*arrays)
            for key, x in zip(task.makes, results, strict=True):
                (here if key.kind is ValueKind.INSIDE else mine)[key] = x
            self._dispatched(self._task, group, results)
        if place in self._sends:
            self._send(self._sends[place], now, once)

    def _takes_part(self, place: Place, group: int) -> bool:
        """Whether a task runs in this process."""
        return True

    def _start(self, place: Place, group: int, arrays: Sequence[Any]) -> None:
        """Prepare for a task that reads these arrays."""
        self._task = self._names[place]

    def _dispatched(self, name: str, group: int, results: Sequence[Any]) -> None:
        """Wait for the results of a task, where no other may run beside it."""
        if self.is_emulated:
            jax.block_until_ready(results)

    def _until_gone(
        self,
        pieces: Sequence[dict[ValueKey, Any]],
        group: int,
        at: tuple[int, int] | None,
    ) -> None:
        """Wait until a chunk's residuals are in host memory.

        Args:
          pieces: values of each micro-batch on the submesh.
          group: index of the submesh.
          at: chunk and micro-batch of the residuals; None: do not wait.
        """
        if at is not None:
            chunk, m = at
            here = pieces[m]
            jax.block_until_ready(
                [here[k] for k in self._waiting[group, chunk] if k in here]
            )

    def _move(
        self, here: dict[ValueKey, Any], group: int, chunk: int, *, is_out: bool
    ) -> None:
        """Move residuals of a micro-batch to host memory, or back.

        Args:
          here: the micro-batch's values on the submesh.
          group: index of the submesh.
          chunk: chunk whose residuals are moved.
          is_out: True for device to host, False for host to device.
        """
        keys = [key for key in self._waiting[group, chunk] if key in here]
        if keys:
            found = self.programs[group].shardings
            want = [on_host(found[k]) if is_out else found[k] for k in keys]
            here.update(zip(keys, moved_to([here[k] for k in keys], want), strict=True))

    def _send(
        self,
        sends: Sequence[TaskSend],
        now: Sequence[dict[ValueKey, Any]],
        once: Sequence[dict[ValueKey, Any]],
    ) -> None:
        for send in sends:
            env = now if send.key.kind is ValueKind.INSIDE else once
            x = env[send.source][send.key]
            have = self.programs[send.source].shardings[send.key]
            env[send.target][send.key] = self._moved(x, send.key, have, send.target)

    def _moved(self, x: Any, key: ValueKey, have: NamedSharding, group: int) -> Any:
        """Move a value to another submesh.

        By `jax.device_put` where both have as many devices along each mesh axis, else
        shard by shard.
        """
        want = self.programs[group].shardings[key]
        if have.mesh.shape == want.mesh.shape:
            return jax.device_put(x, want)
        if (key, have.mesh, group) not in self._moves:
            aval = self.step.types[key]
            as_sent = leaving(have, want, aval.shape)
            move = MeshMove.of(key.label, aval, as_sent, want)
            self._moves[key, have.mesh, group] = move
        move = self._moves[key, have.mesh, group]
        x = self._relaid(x, have, move.source)
        if self.is_emulated:
            jax.block_until_ready(x)
        return move.here(x)
