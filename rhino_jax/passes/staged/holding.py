"""Values that a submesh holds between its tasks, and which may be on its host."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rhino_jax.passes.staged.step import StagedTask, TaskKind, ValueKey, ValueKind


FIXED = frozenset(
    {ValueKind.INPUT, ValueKind.ENTERING, ValueKind.SUM, ValueKind.COUPLED}
)
"""Kinds of values that are live for the whole step."""


@dataclass(frozen=True, eq=False)
class TaskResiduals:
    """Residuals that tasks of a submesh save for later ones.

    Attributes:
      left: residual of a micro-batch, which a forward pass computes or receives, here
        or elsewhere, and a later task reads → the first chunk that has it.
      late: chunk → what its WEIGHTS task reads, where gradients of weights are a task
        of their own.
      ahead: values of forward passes.
    """

    left: dict[ValueKey, int]
    late: dict[int, frozenset[ValueKey]]
    ahead: frozenset[ValueKey]

    @classmethod
    def of(
        cls, tasks: Sequence[StagedTask], received: Collection[ValueKey] = ()
    ) -> TaskResiduals:
        """Collect the residuals of a submesh's tasks.

        Args:
          tasks: of a submesh, in an order in which they can run.
          received: values received from forward passes of other submeshes. One that no
            forward pass here reads counts for the chunk of the first backward pass that
            does.
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
                if task.kind is TaskKind.WEIGHT_GRADIENT:
                    late[task.place] = frozenset(keys)
        left = {key: at for key, at in ahead.items() if key in read}
        return cls(left, late, frozenset(ahead))

    def of_chunk(
        self, chunk: int
    ) -> tuple[Set[ValueKey], Set[ValueKey], Set[ValueKey]]:
        """Return the residuals of a chunk, per micro-batch.

        Returns:
          Residuals of its forward pass; those that its WEIGHTS task reads, where there
            is one; what that task reads in addition.
        """
        left = {key for key, at in self.left.items() if at == chunk}
        late = self.late.get(chunk, frozenset())
        return left, left & late, late - self.ahead

    def held(self, task: StagedTask) -> list[ValueKey]:
        """Return the arguments and results of a task that are live beyond its run.

        They are live before it, after it, or from its start on. The other ones are
        temporaries of the task.
        """
        late = frozenset[ValueKey]().union(*self.late.values())
        inside = self.left.keys() | late
        keys = dict.fromkeys((*task.reads, *task.makes))
        return [k for k in keys if k.kind in FIXED or k in inside]


def is_once(task: StagedTask) -> bool:
    """Whether a task runs while no residuals of micro-batches are live.

    That is at a step's start or end, and not between forward and backward passes.
    """
    return not task.is_per_micro_batch and task.kind is not TaskKind.BETWEEN


def earlier_results(tasks: Sequence[StagedTask], task: StagedTask) -> list[ValueKey]:
    """Return results of earlier once-a-step tasks that are live and not read by a task.

    Results of the step, and what other submeshes or later rounds read, are live until
    the step ends.
    """
    before = tasks[: tasks.index(task)]
    made = dict.fromkeys(k for t in before for k in t.makes)
    return [k for k in made if k.kind is ValueKind.AFTER and k not in task.reads]


def may_wait(
    tasks: Sequence[StagedTask], received: Collection[ValueKey]
) -> frozenset[ValueKey]:
    """Return the residuals that may be offloaded between forward and backward.

    The forward task of a chunk computes or receives them for a micro-batch, and of the
    other tasks of this submesh only the backward task of the same chunk has them.

    Args:
      tasks: of a submesh.
      received: keys received from forward tasks of other submeshes.
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
    """Whether a value is numbers: random keys stay on the device."""
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
