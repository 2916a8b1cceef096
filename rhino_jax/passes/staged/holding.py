"""What a group holds between its tasks, from which to which; what its host may hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rhino_jax.passes.staged.step import StagedTask, TaskKind, ValueKey, ValueKind


FIXED = frozenset(
    {ValueKind.INPUT, ValueKind.ENTERING, ValueKind.SUM, ValueKind.COUPLED}
)
"""Values of the whole step."""


@dataclass(frozen=True, eq=False)
class TaskResiduals:
    """What the tasks of a group leave for one another.

    Attributes:
      left: of a micro-batch, what forward passes make or receive, there or elsewhere,
        and later tasks read → the first chunk that has it.
      late: chunk → what its gradients of weights read, where these are a task apart.
      ahead: what forward passes have.
    """

    left: dict[ValueKey, int]
    late: dict[int, frozenset[ValueKey]]
    ahead: frozenset[ValueKey]

    @classmethod
    def of(
        cls, tasks: Sequence[StagedTask], received: Collection[ValueKey] = ()
    ) -> TaskResiduals:
        """Args:
        tasks: of a group, in an order in which they can run.
        received: of forward passes of other groups. Where none of this group reads
          it, a backward pass does: it is there from when it would be read.
        """
        ahead: dict[ValueKey, int] = {}
        read: set[ValueKey] = set()
        late: dict[int, frozenset[ValueKey]] = {}
        for task in tasks:
            keys = {k for k in (*task.makes, *task.reads) if k.kind is ValueKind.INSIDE}
            if task.kind is TaskKind.FORWARD:
                ahead = {**dict.fromkeys(keys, task.place), **ahead}
            elif task.is_per_micro_batch:
                read |= keys
                there = keys.intersection(received)
                ahead = {**dict.fromkeys(there, task.place), **ahead}
                if task.kind is TaskKind.WEIGHTS:
                    late[task.place] = frozenset(keys)
        left = {key: at for key, at in ahead.items() if key in read}
        return cls(left, late, frozenset(ahead))

    def of_chunk(
        self, chunk: int
    ) -> tuple[Set[ValueKey], Set[ValueKey], Set[ValueKey]]:
        """What a chunk's tasks leave for one another, of a micro-batch.

        Returns:
          What its forward pass leaves; what of that its gradients of weights read,
          where these are a task apart; what they read beyond.
        """
        left = {key for key, at in self.left.items() if at == chunk}
        late = self.late.get(chunk, frozenset())
        return left, left & late, late - self.ahead

    def held(self, task: StagedTask) -> list[ValueKey]:
        """What of a task's arguments and results is held whether or not it runs: from
        before it, after it, or from its start on. The rest is its own while it runs."""
        late = frozenset[ValueKey]().union(*self.late.values())
        inside = self.left.keys() | late
        keys = dict.fromkeys((*task.reads, *task.makes))
        return [k for k in keys if k.kind in FIXED or k in inside]


def is_once(task: StagedTask) -> bool:
    """Whether it runs when nothing of micro-batches is held: at a step's start or end,
    and not between forward and backward passes."""
    return not task.is_per_micro_batch and task.kind is not TaskKind.BETWEEN


def earlier_results(tasks: Sequence[StagedTask], task: StagedTask) -> list[ValueKey]:
    """What tasks before this one made once a step, and it does not read: results, and
    what other groups or later rounds read, are held until the step ends."""
    before = tasks[: tasks.index(task)]
    made = dict.fromkeys(k for t in before for k in t.makes)
    return [k for k in made if k.kind is ValueKind.AFTER and k not in task.reads]


def may_wait(
    tasks: Sequence[StagedTask], received: Collection[ValueKey]
) -> frozenset[ValueKey]:
    """What the forward task of a chunk makes or receives of a micro-batch, and of the
    group's other tasks the backward task of the same chunk alone has.

    Args:
      tasks: of a group.
      received: of forward tasks of other groups.
    """
    users: dict[ValueKey, set[tuple[TaskKind, int]]] = {}
    made: set[ValueKey] = {*received}
    for task in tasks:
        if task.kind is TaskKind.FORWARD:
            made.update(task.makes)
        for key in (*task.reads, *task.makes):
            users.setdefault(key, set()).add((task.kind, task.place))
    return frozenset(
        key
        for key, own in users.items()
        if key.kind is ValueKind.INSIDE
        and key in made
        and {kind for kind, _ in own} == {TaskKind.FORWARD, TaskKind.BACKWARD}
        and len(own) == 2
        and len({place for _, place in own}) == 1
    )


def is_plain(aval: jax.core.ShapedArray) -> bool:
    """Whether a value is numbers: keys of random bits stay on the device."""
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
