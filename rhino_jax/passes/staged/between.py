"""Tasks that compute what couples micro-batches, once a step.

They run between all forward and all backward passes, or between AHEAD tasks and
backward passes. Every submesh whose backward passes read such values computes them for
itself, of outputs of the forward passes: that is little (embeddings of the batch, sums
over it), and submeshes would else wait for one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhino_jax._compat import hide_frames
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.labels import Labels
from rhino_jax.passes.staged.names import ValueNames
from rhino_jax.passes.staged.step import StagedTask, TaskKind, TaskSend, ValueKind


hide_frames(__file__)


def between(apart: Apart, labels: Labels, names: ValueNames) -> list[StagedTask]:
    """Return the BETWEEN tasks, one for every submesh that reads coupled values.

    Args:
      apart: the step.
      labels: of its micro-batches.
      names: keys of its values.
    """
    read: dict[int, set[int]] = {}
    for label, values in enumerate(labels.reads):
        coupled = values & labels.sides.coupled
        read.setdefault(labels.group(label), set()).update(coupled)
    return [
        _task(apart, names, group, sorted(values))
        for group, values in sorted(read.items())
        if values
    ]


def _task(apart: Apart, names: ValueNames, group: int, values: list[int]) -> StagedTask:
    first, lines = 1 + len(apart.entering), names.between
    made = [names.of_piece[v] - first for v in values]
    equations, needed = lines.needed(lines.outputs[p] for p in made)
    reads = sorted(needed)
    left = {v: k for k, v in enumerate(lines.inputs[names.inputs :])}

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(reads, arrays, strict=True))
        for v in reads:
            if v in left:
                env[v] = apart.finished(left[v], env[v], lines.avals[v].dtype)
        lines.run(sorted(equations), env)
        return [lines.result(p, env) for p in made]

    return StagedTask(
        TaskKind.BETWEEN,
        group,
        0,
        tuple(names.left(left[v]) if v in left else names.step_input(v) for v in reads),
        tuple(map(names.coupled, made)),
        run,
    )


def sends_between(
    tasks: list[StagedTask], labels: Labels, kinds: Mapping[int, TaskKind]
) -> list[TaskSend]:
    """Return what BETWEEN tasks read of forward passes on other submeshes.

    Args:
      tasks: of `between`.
      labels: of micro-batches.
      kinds: turn of a label → kind of its tasks.
    """
    found = []
    for task in tasks:
        for key in task.reads:
            if key.kind is not ValueKind.SUM:
                continue
            at = labels.left_at[key.number]
            if labels.group(at) != task.group:
                kind, place = kinds[labels.turn(at)], labels.chunk(at)
                found.append(TaskSend(key, labels.group(at), task.group, kind, place))
    return found
