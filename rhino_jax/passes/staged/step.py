"""A step as tasks of stage submeshes: what each runs, reads and computes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class ValueKind(enum.StrEnum):
    """Kinds of values of a step.

    INPUT: of the step, by position. PIECE: the number of the micro-batch. ENTERING: an
    input of micro-batches, computed once from inputs. INSIDE: of one micro-batch. SUM:
    an accumulated output of micro-batches. COUPLED: read by backward passes, computed
    once from outputs of all forward passes. AFTER: computed once, after them.
    """

    INPUT = "input"
    PIECE = "piece"
    ENTERING = "entering"
    INSIDE = "inside"
    SUM = "sum"
    COUPLED = "coupled"
    AFTER = "after"


class ValueKey(NamedTuple):
    """Names a value of a step: its kind, and its number among such."""

    kind: ValueKind
    number: int = 0

    @property
    def label(self) -> str:
        """A description for tables and messages, as "value 25 of a micro-batch"."""
        return _LABELS[self.kind].format(self.number)


_LABELS = {
    ValueKind.INPUT: "input {}",
    ValueKind.PIECE: "number of the micro-batch",
    ValueKind.ENTERING: "input {} of micro-batches",
    ValueKind.INSIDE: "value {} of a micro-batch",
    ValueKind.SUM: "accumulated sum {}",
    ValueKind.COUPLED: "value {} of all forward passes",
    ValueKind.AFTER: "value {} of the update",
}


class TaskKind(enum.StrEnum):
    """Kinds of tasks.

    START: once, before. FORWARD, BACKWARD: of a chunk, for every micro-batch.
    WEIGHT_GRADIENT: the part of the backward pass that nothing waits for, where that is
    split off; INPUT_GRADIENT: the rest, as schedules name it. BETWEEN: once, after the
    forward passes of all micro-batches and before any of their backward passes, where
    the rows of the batch meet. UPDATE: once, after them, in rounds.
    """

    START = "start"
    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input-gradient"
    WEIGHT_GRADIENT = "weight-gradient"
    BETWEEN = "between"
    UPDATE = "update"

    @property
    def is_per_micro_batch(self) -> bool:
        """Whether it runs once per micro-batch, not once per step."""
        return self not in (TaskKind.START, TaskKind.BETWEEN, TaskKind.UPDATE)


@dataclass(frozen=True, slots=True, eq=False)
class StagedTask:
    """One program that a submesh runs.

    Attributes:
      kind: its kind.
      group: index of the submesh.
      place: the chunk of tasks that run for every micro-batch, the round of an UPDATE.
      reads, makes: keys of the arguments and results of `run`, in order.
      run: a function of flat arrays, to be traced. In forward passes it tags
        (`_compat.tagged`) the forward ops of a micro-batch with their positions in
        `Sides.forward`.
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
        return f"{self.kind.name.lower()}{at}_of_group_{self.group}"

    @property
    def is_per_micro_batch(self) -> bool:
        return self.kind.is_per_micro_batch


@dataclass(frozen=True, slots=True)
class TaskSend:
    """A value that one submesh sends to another.

    Attributes:
      key: the value.
      source, target: submeshes.
      kind, place: of the task of the source that computes it.
    """

    key: ValueKey
    source: int
    target: int
    kind: TaskKind
    place: int


def received(sends: Iterable[TaskSend], group: int) -> frozenset[ValueKey]:
    """Return `StagedStep.received` from sends alone."""
    return frozenset(
        s.key
        for s in sends
        if s.target == group
        and s.kind is TaskKind.FORWARD
        and s.key.kind is ValueKind.INSIDE
    )


@dataclass(frozen=True, slots=True, eq=False)
class StagedStep:
    """All tasks of a step, and what is sent between them.

    Attributes:
      groups: number of submeshes.
      chunks: for every chunk its submesh.
      micro_batches: number of micro-batches.
      tasks: for every submesh, each after those whose results it reads.
      sends: between submeshes.
      home: for every input of the step, the submesh that takes it.
      copies: (input, submesh): read there too.
      outputs: for every result of the step its submesh and key; its value where it is a
        literal.
      types: for every value, its shape and dtype (an abstract value of JAX).
      offloaded: for every submesh, residuals of its forward tasks that are in host
        memory until its backward tasks; empty where nothing is.
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
        """Return residuals of a micro-batch that a submesh offloads to host memory."""
        return self.offloaded[group] if self.offloaded else frozenset()

    @property
    def offloading(self) -> tuple[int, ...]:
        """Chunks whose forward tasks offload something."""
        return tuple(
            task.place
            for group, of in enumerate(self.tasks)
            for task in of
            if task.kind is TaskKind.FORWARD
            and not self.waits_on_host(group).isdisjoint((*task.reads, *task.makes))
        )

    @property
    def met(self) -> tuple[TaskSend, ...]:
        """Values sent when all forward passes are done, for BETWEEN tasks."""
        between = (t for of in self.tasks for t in of if t.kind is TaskKind.BETWEEN)
        wanted = {(key, task.group) for task in between for key in task.reads}
        return tuple(s for s in self.sends if (s.key, s.target) in wanted)

    def sent(self, group: int) -> tuple[ValueKey, ...]:
        """Return the values that a submesh sends to others."""
        return tuple(dict.fromkeys(s.key for s in self.sends if s.source == group))

    def received(self, group: int) -> frozenset[ValueKey]:
        """Return what forward passes of others send to a submesh, per micro-batch."""
        return received(self.sends, group)

    def inputs(self, group: int) -> tuple[ValueKey, ...]:
        """Return the inputs of the step that tasks of a submesh read."""
        made = {key for task in self.tasks[group] for key in task.reads}
        return tuple(sorted(k for k in made if k.kind is ValueKind.INPUT))
