"""A step as tasks of groups of devices: which runs what, reads what, and makes what."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class ValueKind(enum.StrEnum):
    """What a value of a step is.

    INPUT: of the step, by position. PIECE: the number of the micro-batch. ENTERING:
    what a micro-batch reads, made once of inputs. INSIDE: of one micro-batch. SUM: what
    all micro-batches so far left. COUPLED: what backward passes read, made once of what
    all forward passes left. AFTER: made once, after them.
    """

    INPUT = "input"
    PIECE = "piece"
    ENTERING = "entering"
    INSIDE = "inside"
    SUM = "sum"
    COUPLED = "coupled"
    AFTER = "after"


class ValueKey(NamedTuple):
    """Names a value of a step: what it is, and its number among such."""

    kind: ValueKind
    number: int = 0


class TaskKind(enum.StrEnum):
    """START: once, before. FORWARD, BACKWARD: of a chunk, for every micro-batch.
    WEIGHTS: what of the backward pass nothing waits for, where that is apart. BETWEEN:
    once, after the forward passes of all micro-batches and before any of their backward
    passes, where the rows of the batch meet. AHEAD: of a chunk, for every micro-batch:
    what BETWEEN reads, where that does not wait for forward passes, which make it
    again. UPDATE: once, after them, in rounds."""

    START = "start"
    AHEAD = "ahead"
    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weights"
    BETWEEN = "between"
    UPDATE = "update"


PER_MICRO_BATCH = frozenset(
    {TaskKind.AHEAD, TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHTS}
)


@dataclass(frozen=True, slots=True, eq=False)
class StagedTask:
    """One program that a group runs.

    Attributes:
      kind: what it is.
      group: which.
      place: the chunk of tasks that run for every micro-batch, the round of an UPDATE.
      reads, makes: values, in the order of arguments and results of `run`.
      run: a function of flat arrays, to be traced. Of a forward pass it marks
        (`_compat.tagged`) what it runs of the forward ops of a micro-batch with their
        positions in `Sides.forward`.
    """

    kind: TaskKind
    group: int
    place: int
    reads: tuple[ValueKey, ...]
    makes: tuple[ValueKey, ...]
    run: Callable[..., list[Any]] = field(repr=False)

    @property
    def name(self) -> str:
        is_alone = self.kind in (TaskKind.START, TaskKind.BETWEEN)
        at = "" if is_alone else f"_{self.place}"
        return f"{self.kind}{at}_of_group_{self.group}"

    @property
    def is_per_micro_batch(self) -> bool:
        return self.kind in PER_MICRO_BATCH


@dataclass(frozen=True, slots=True)
class TaskSend:
    """A value that tasks of another group read.

    Attributes:
      key: what.
      source, target: groups.
      kind, place: of the task of the source that makes it.
    """

    key: ValueKey
    source: int
    target: int
    kind: TaskKind
    place: int


def received(sends: Iterable[TaskSend], group: int) -> frozenset[ValueKey]:
    """See `StagedStep.received`."""
    return frozenset(
        s.key
        for s in sends
        if s.target == group
        and s.kind is TaskKind.FORWARD
        and s.key.kind is ValueKind.INSIDE
    )


@dataclass(frozen=True, slots=True, eq=False)
class StagedStep:
    """All that runs in a step.

    Attributes:
      groups: how many.
      chunks: of every chunk its group.
      micro_batches: how many.
      tasks: of every group, each after those of it whose results it reads.
      sends: between groups.
      home: of every input of the step, the group that takes it.
      copies: (input, group): read there too.
      outputs: of every result of the step: its group and its key; None where it is a
        literal.
      types: of every value, its shape and dtype (an abstract value of JAX).
      offloaded: of every group, what its forward tasks leave for its backward tasks
        that waits in the host's memory; empty where nothing does.
    """

    groups: int
    chunks: tuple[int, ...]
    micro_batches: int
    tasks: tuple[tuple[StagedTask, ...], ...]
    sends: tuple[TaskSend, ...]
    home: tuple[int, ...]
    copies: frozenset[tuple[int, int]]
    outputs: tuple[tuple[int, ValueKey] | Any, ...]
    types: dict[ValueKey, Any]
    offloaded: tuple[frozenset[ValueKey], ...] = ()

    def waits_on_host(self, group: int) -> frozenset[ValueKey]:
        """What of a micro-batch a group has in the host's memory in between."""
        return self.offloaded[group] if self.offloaded else frozenset()

    @property
    def offloading(self) -> tuple[int, ...]:
        """Chunks whose forward tasks leave something there."""
        return tuple(
            task.place
            for group, of in enumerate(self.tasks)
            for task in of
            if task.kind is TaskKind.FORWARD
            and not self.waits_on_host(group).isdisjoint((*task.reads, *task.makes))
        )

    @property
    def met(self) -> tuple[TaskSend, ...]:
        """What is sent when all forward passes are done, for tasks between these and
        backward passes."""
        between = (t for of in self.tasks for t in of if t.kind is TaskKind.BETWEEN)
        wanted = {(key, task.group) for task in between for key in task.reads}
        return tuple(s for s in self.sends if (s.key, s.target) in wanted)

    def sent(self, group: int) -> tuple[ValueKey, ...]:
        """What others read that a group makes."""
        return tuple(dict.fromkeys(s.key for s in self.sends if s.source == group))

    def received(self, group: int) -> frozenset[ValueKey]:
        """Of a micro-batch, what forward passes of other groups make and it reads."""
        return received(self.sends, group)

    def inputs(self, group: int) -> tuple[ValueKey, ...]:
        """Inputs of the step that tasks of a group read."""
        made = {key for task in self.tasks[group] for key in task.reads}
        return tuple(sorted(k for k in made if k.kind is ValueKind.INPUT))
