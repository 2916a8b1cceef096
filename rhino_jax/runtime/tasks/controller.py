"""Dispatch the tasks of a step in the order of its schedule, in one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
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
    Way,
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
            (task.kind, task.group, task.place): (p, i, task)
            for p in self.programs
            for i, task in enumerate(p.of.tasks)
        }
        # Sums are sent once a step, by `_run`.
        sends, met = defaultdict[Place, list[TaskSend]](list), self.step.met
        for send in self.step.sends:
            if send.key.kind is not ValueKind.SUM:
                sends[send.kind, send.source, send.place].append(send)
        self._ways = {place: self._ways_of(found) for place, found in sends.items()}
        self._met = self._ways_of(met)
        sums = (s for s in self.step.sends if s.key.kind is ValueKind.SUM)
        self._sums = self._ways_of(send for send in sums if send not in met)
        self._unread = self._unread_after()
        self._waiting = {
            (group, place): [
                k
                for k in (*task.reads, *task.makes)
                if k in self.step.waits_on_host(group)
            ]
            for (kind, group, place), (_, _, task) in self._at.items()
            if kind is TaskKind.FORWARD
        }

    def _ways_of(self, sends: Iterable[TaskSend]) -> list[Way]:
        """Group sends by source and target."""
        keys = defaultdict[tuple[int, int], list[ValueKey]](list)
        for send in sends:
            keys[send.source, send.target].append(send.key)
        return [
            Way(*ends, tuple(sent), [self.programs[ends[0]].shardings[k] for k in sent])
            for ends, sent in keys.items()
        ]

    def _unread_after(self) -> list[list[ValueKey]]:
        """Return the values of its micro-batch that are dead after each task."""
        found: list[list[ValueKey]] = []
        seen: dict[tuple[int, int], set[ValueKey]] = {}
        for kind, chunk, m, *_ in reversed(self.order):
            group = self.step.chunks[chunk]
            at = self._at.get((kind, group, chunk))  # None for BETWEEN: frees nothing.
            keys = () if at is None else (*at[2].reads, *at[2].makes)
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
        met = self._met
        for turn, unread in zip(self.order, self._unread, strict=True):
            kind, chunk, m, gone, goes_out, back = turn
            group, now = step.chunks[chunk], [of[m] for of in pieces]
            self._until_gone(pieces[group], group, gone)
            self._piece = None if kind is TaskKind.BETWEEN else m
            if kind is TaskKind.BETWEEN:
                # Sums are sent once, before the first of these tasks.
                self._send(met, once, once)
                met = []
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
        self._send(self._sums, once, once)
        every = (task for of in step.tasks for task in of)
        rounds = [(t.place, t.group) for t in every if t.kind is TaskKind.UPDATE]
        for place, group in sorted(rounds):
            self._dispatch((TaskKind.UPDATE, group, place), once, once)
        return [self._result(o, once, arrays) for o in step.outputs]

    def _result(
        self, output: Any, once: Sequence[dict[ValueKey, Any]], arrays: Any
    ) -> Any:
        if not isinstance(output, tuple):
            return placed([np.asarray(output)], [self.programs[0].everywhere])[0]
        group, key = output
        return arrays[key.number] if key.kind is ValueKind.INPUT else once[group][key]

    def _inputs(self, group: int, arrays: Sequence[Any]) -> dict[ValueKey, Any]:
        keys, home = self.step.inputs(group), self.step.home
        found = {k: arrays[k.number] for k in keys if home[k.number] == group}
        for source in range(self.step.groups):
            sent = tuple(k for k in keys if home[k.number] == source != group)
            if sent:
                given = [arrays[k.number] for k in sent]
                way = Way(source, group, sent, [x.sharding for x in given])
                found |= zip(sent, self._moved(way, given), strict=True)
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
        (programs, position, task), group = found, place[1]
        if self._takes_part(place, group):
            mine, here = once[group], now[group]
            arrays = [here[k] if k in here else mine[k] for k in task.reads]
            self._start(task.name, group, arrays)
            with in_mesh(programs.mesh):
                results = programs.all[position](*arrays)
            for key, x in zip(task.makes, results, strict=True):
                (here if key.kind is ValueKind.INSIDE else mine)[key] = x
            self._dispatched(self._task, group, results)
        if place in self._ways:
            self._send(self._ways[place], now, once)

    def _takes_part(self, place: Place, group: int) -> bool:
        """Whether a task runs in this process."""
        return True

    def _start(self, name: str, group: int, arrays: Sequence[Any]) -> None:
        """Prepare for a task that reads these arrays."""
        self._task = name

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
        ways: Sequence[Way],
        now: Sequence[dict[ValueKey, Any]],
        once: Sequence[dict[ValueKey, Any]],
    ) -> None:
        for way in ways:
            envs = [now if k.kind is ValueKind.INSIDE else once for k in way.keys]
            ends = [(e[way.source], e[way.target]) for e in envs]
            given = [of.get(k) for (of, _), k in zip(ends, way.keys, strict=True)]
            moved = self._moved(way, given)
            for (_, to), key, x in zip(ends, way.keys, moved, strict=True):
                if x is not None:
                    to[key] = x

    def _moved(self, way: Way, arrays: Sequence[Any]) -> Sequence[Any]:
        """Move values to another submesh; None where they are in other processes."""
        given = zip(way.keys, arrays, way.have, strict=True)
        return [self._moved_alone(*each, way.target) for each in given]

    def _moved_alone(
        self, key: ValueKey, x: Any, have: NamedSharding, group: int
    ) -> Any:
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
