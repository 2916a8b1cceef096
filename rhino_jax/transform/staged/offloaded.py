"""What of a group may wait in the host's memory for its backward task."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp

from rhino_jax.transform.staged.step import Key, Kind, Task, TaskKind


def may_wait(tasks: Sequence[Task], received: Collection[Key]) -> frozenset[Key]:
    """What the forward task of a chunk makes or receives of a micro-batch, and of the
    group's other tasks the backward task of the same chunk alone has.

    Args:
      tasks: of a group.
      received: of forward tasks of other groups.
    """
    users: dict[Key, set[tuple[TaskKind, int]]] = {}
    made: set[Key] = {*received}
    for task in tasks:
        if task.kind is TaskKind.FORWARD:
            made.update(task.makes)
        for key in (*task.reads, *task.makes):
            users.setdefault(key, set()).add((task.kind, task.place))
    return frozenset(
        key
        for key, own in users.items()
        if key.kind is Kind.INSIDE
        and key in made
        and {kind for kind, _ in own} == {TaskKind.FORWARD, TaskKind.BACKWARD}
        and len(own) == 2
        and len({place for _, place in own}) == 1
    )


def is_plain(aval: jax.core.ShapedArray) -> bool:
    """Whether a value is numbers: keys of random bits stay on the device."""
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
