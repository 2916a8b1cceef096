"""The tasks of one step, built from the costs of its stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from rhino_jax.pipeline.tasks import (
    Hold,
    Key,
    Task,
    TaskGraph,
    TaskKind,
    Transfer,
)
from rhino_jax.pipeline.work import StepWork
from rhino_jax.plan.stages import StageCost


def graph_of(
    work: StepWork, *, is_split: bool = False, is_forward_only: bool = False
) -> TaskGraph:
    """Return all tasks and transfers of one step.

    The forward pass of a micro-batch saves residuals (activations), which its backward
    pass frees. A sequence slice waits for the slices before it (attention reads their
    keys and values), and its backward pass for those after it (TeraPipe, arXiv
    2102.07988). If micro-batches are coupled, all forward passes precede all backward
    passes.

    Args:
      work: costs of the stages.
      is_split: whether gradients of inputs and of weights are separate tasks (Zero
        Bubble, arXiv 2401.10241): only the update waits for the latter.
      is_forward_only: whether the step has neither backward passes nor an update.
    """
    backward = _SPLIT if is_split else (TaskKind.BACKWARD,)
    kinds = (TaskKind.FORWARD, *(() if is_forward_only else backward))
    at, tasks = _tasks(work, kinds)
    batches, slices = range(work.micro_batches), range(work.slices)

    def sends() -> Iterator[tuple[int, int, int]]:
        """Yield (source, target, bytes) of every dependency between chunks."""
        for m, edge, s in product(batches, work.edges, slices):
            both = edge.forward_bytes, edge.backward_bytes
            for kind, sizes in zip(kinds, both, strict=False):
                ends = at[kind, edge.source, m, s], at[kind, edge.target, m, s]
                yield *(ends if kind is kinds[0] else ends[::-1]), sizes[s]
        for group, between in enumerate(() if is_forward_only else work.between):
            for source, size in between.receives:
                last = work.chunks_of[source][-1], batches[-1], slices[-1]
                target = at[TaskKind.BETWEEN, work.chunks_of[group][0], 0, 0]
                yield at[TaskKind.FORWARD, *last], target, size

    transfers = []
    for source, target, size in sends():
        ends = tasks[source].group, tasks[target].group
        route = work.routes.get(ends)
        if ends[0] == ends[1] or route is None:
            earlier = (*tasks[target].after, source)
            tasks[target] = replace(tasks[target], after=earlier)
            continue
        transfers.append(
            Transfer(
                source=source,
                targets=(target,),
                link=route,
                bytes=size,
                seconds=work.links[route].seconds(size),
            )
        )
    return TaskGraph(
        groups=work.groups,
        tasks=tuple(tasks),
        transfers=tuple(transfers),
        links=work.links,
        fixed_bytes=work.fixed_bytes,
        limit_bytes=work.limit_bytes,
    )


_SPLIT = TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT
"""A backward pass as two tasks."""


def _tasks(
    work: StepWork, kinds: Sequence[TaskKind]
) -> tuple[dict[Key, int], list[Task]]:
    """Return the tasks of a step, by position, without what chunks send to others.

    Args:
      work: costs of the stages.
      kinds: kinds of the tasks of every chunk and micro-batch.
    """
    has_backward, is_split = len(kinds) > 1, len(kinds) > 2
    has_between = bool(work.between) and has_backward
    batches, slices = range(work.micro_batches), range(work.slices)
    chunks = range(len(work.chunks))
    firsts = [of[0] for of in work.chunks_of]
    once = [TaskKind.BETWEEN] * has_between
    once += [TaskKind.UPDATE] * (work.has_update and has_backward)
    keys: list[Key] = [
        (kind, c, m, s) for m, c, kind, s in product(batches, chunks, kinds, slices)
    ]
    keys += ((kind, c, 0, 0) for kind, c in product(once, firsts))
    at = {key: i for i, key in enumerate(keys)}

    def after(key: Key) -> Iterator[Key]:
        """Yield the tasks that a task waits for without a transfer."""
        kind, c, m, s = key
        group = work.chunks[c].group
        if kind is TaskKind.FORWARD and s:
            yield kind, c, m, s - 1
        elif has_backward and kind is kinds[1]:
            yield TaskKind.FORWARD, c, m, s
            if has_between:
                yield TaskKind.BETWEEN, firsts[group], 0, 0
            if s + 1 < work.slices:
                yield kind, c, m, s + 1
        elif kind is TaskKind.WEIGHT_GRADIENT:
            yield kinds[1], c, m, s
        elif kind is TaskKind.BETWEEN:
            yield from (k for k in keys if k[0] is TaskKind.FORWARD)
        elif kind is TaskKind.UPDATE:
            for place in product(work.chunks_of[group], batches, slices):
                yield kinds[-1], *place

    def holds(key: Key, cost: StageCost) -> tuple[Hold, ...]:
        kind, c, m, s = key
        sizes: dict[TaskKind, int] = {}
        if kind is TaskKind.INPUT_GRADIENT:
            sizes = {TaskKind.WEIGHT_GRADIENT: cost.output_gradient_bytes}
        elif kind is TaskKind.FORWARD and is_split:
            sizes = dict(zip(_SPLIT, cost.split_bytes, strict=True))
        elif kind is TaskKind.FORWARD and has_backward:
            sizes = {TaskKind.BACKWARD: cost.activation_bytes}
        return tuple(
            Hold(size, (at[reader, c, m, s],)) for reader, size in sizes.items() if size
        )

    def task(key: Key) -> Task:
        kind, c, m, s = key
        group, cost = work.chunks[c].group, work.chunks[c].costs[s]
        seconds = {
            TaskKind.FORWARD: cost.forward_s,
            TaskKind.BACKWARD: cost.whole_backward_s,
            **dict(zip(_SPLIT, cost.split_s, strict=True)),
            TaskKind.BETWEEN: work.between[group].seconds if has_between else 0.0,
            TaskKind.UPDATE: cost.update_s,
        }[kind]
        # A half of a backward pass that has no work is not dispatched.
        if kind.is_per_micro_batch and (seconds or kind not in _SPLIT):
            seconds += work.dispatch_s
        working = cost.update_bytes if kind is TaskKind.UPDATE else 0
        return Task(
            kind=kind,
            group=group,
            chunk=c,
            micro_batch=m,
            slice=s,
            seconds=seconds,
            holds=holds(key, cost),
            working_bytes=cost.working_bytes if kind.is_per_micro_batch else working,
            after=tuple(at[k] for k in after(key)),
        )

    return at, list(map(task, keys))
