"""The tasks of one step, built from the costs of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    return _TaskGraphBuilder(work, is_split, is_forward_only).build()


class _TaskGraphBuilder:
    def __init__(self, work: StepWork, is_split: bool, is_forward_only: bool) -> None:
        self.work = work
        self.is_split = is_split
        self.is_forward_only = is_forward_only
        self.backward = TaskKind.INPUT_GRADIENT if is_split else TaskKind.BACKWARD
        self.has_between = bool(work.between) and not is_forward_only
        self.has_update = work.has_update and not is_forward_only
        self.keys = [
            *self._micro_batch_keys(),
            *(
                (kind, chunks[0], 0, 0)
                for kind in self._step_kinds()
                for chunks in work.chunks_of
            ),
        ]
        self.at = {key: i for i, key in enumerate(self.keys)}

    def _micro_batch_keys(self) -> Iterator[Key]:
        kinds = [TaskKind.FORWARD]
        if not self.is_forward_only:
            kinds.append(self.backward)
        if self.is_split and not self.is_forward_only:
            kinds.append(TaskKind.WEIGHT_GRADIENT)
        chunks = range(len(self.work.chunks))
        for m in range(self.work.micro_batches):
            for c, kind in product(chunks, kinds):
                for s in range(self.work.slices):
                    yield kind, c, m, s

    def _step_kinds(self) -> tuple[TaskKind, ...]:
        between = (TaskKind.BETWEEN,) if self.has_between else ()
        return (*between, TaskKind.UPDATE) if self.has_update else between

    def build(self) -> TaskGraph:
        work = self.work
        tasks = tuple(map(self._task, self.keys))
        transfers: list[Transfer] = []
        local: dict[int, list[int]] = {}
        for source, target, size in self._sends():
            a, b = tasks[source].group, tasks[target].group
            route = work.routes.get((a, b))
            if a == b or route is None:
                local.setdefault(target, []).append(source)
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
            tasks=tuple(
                replace(task, after=(*task.after, *local.get(i, ())))
                for i, task in enumerate(tasks)
            ),
            transfers=tuple(transfers),
            links=work.links,
            fixed_bytes=work.fixed_bytes,
            limit_bytes=work.limit_bytes,
        )

    def _task(self, key: Key) -> Task:
        kind, c, m, s = key
        group = self.work.chunks[c].group
        cost = self.work.chunks[c].costs[s]
        seconds = {
            TaskKind.FORWARD: cost.forward_s,
            TaskKind.BACKWARD: cost.whole_backward_s,
            TaskKind.INPUT_GRADIENT: cost.split_s[0],
            TaskKind.WEIGHT_GRADIENT: cost.split_s[1],
            TaskKind.BETWEEN: self.work.between[group].seconds
            if self.has_between
            else 0.0,
            TaskKind.UPDATE: cost.update_s,
        }
        took = seconds[kind]
        # A half of a backward pass that has no work is not dispatched.
        halves = TaskKind.INPUT_GRADIENT, TaskKind.WEIGHT_GRADIENT
        if kind.is_per_micro_batch:
            took += self.work.dispatch_s if took or kind not in halves else 0.0
        working = cost.working_bytes if kind.is_per_micro_batch else 0
        if kind is TaskKind.UPDATE:
            working = cost.update_bytes
        return Task(
            kind=kind,
            group=group,
            chunk=c,
            micro_batch=m,
            slice=s,
            seconds=took,
            holds=self._holds(key, cost),
            working_bytes=working,
            after=tuple(self.at[k] for k in self._after(key)),
        )

    def _holds(self, key: Key, cost: StageCost) -> tuple[Hold, ...]:
        kind, *place = key
        if self.is_forward_only or kind not in (
            TaskKind.FORWARD,
            TaskKind.INPUT_GRADIENT,
        ):
            return ()

        def until(size: int, kind: TaskKind) -> list[Hold]:
            c, m, s = place
            return [Hold(size, (self.at[kind, c, m, s],))] if size else []

        if kind is TaskKind.INPUT_GRADIENT:
            return tuple(until(cost.output_gradient_bytes, TaskKind.WEIGHT_GRADIENT))
        if not self.is_split:
            return tuple(until(cost.activation_bytes, TaskKind.BACKWARD))
        early, late = cost.split_bytes
        return (
            *until(early, TaskKind.INPUT_GRADIENT),
            *until(late, TaskKind.WEIGHT_GRADIENT),
        )

    def _after(self, key: Key) -> Iterable[Key]:
        """Return the tasks that a task waits for without a transfer."""
        kind, c, m, s = key
        if kind is TaskKind.FORWARD:
            return [(kind, c, m, s - 1)] if s else []
        if kind is self.backward:
            found: list[Key] = [(TaskKind.FORWARD, c, m, s)]
            if self.has_between:
                first = self.work.chunks_of[self.work.chunks[c].group][0]
                found.append((TaskKind.BETWEEN, first, 0, 0))
            return found + ([(kind, c, m, s + 1)] if s + 1 < self.work.slices else [])
        if kind is TaskKind.WEIGHT_GRADIENT:
            return [(TaskKind.INPUT_GRADIENT, c, m, s)]
        if kind is TaskKind.BETWEEN:
            return [k for k in self.keys if k[0] is TaskKind.FORWARD]
        return self._gradients(self.work.chunks[c].group)

    def _gradients(self, group: int) -> Iterator[Key]:
        kind = TaskKind.WEIGHT_GRADIENT if self.is_split else TaskKind.BACKWARD
        batches, slices = range(self.work.micro_batches), range(self.work.slices)
        for c, m, s in product(self.work.chunks_of[group], batches, slices):
            yield kind, c, m, s

    def _sends(self) -> Iterator[tuple[int, int, int]]:
        """Yield (source, target, bytes) of every dependency between chunks."""
        at, work = self.at, self.work
        batches, slices = range(work.micro_batches), range(work.slices)
        for m, edge, s in product(batches, work.edges, slices):
            a, b = edge.source, edge.target
            forward = at[TaskKind.FORWARD, a, m, s], at[TaskKind.FORWARD, b, m, s]
            yield *forward, edge.forward_bytes[s]
            if not self.is_forward_only:
                backward = at[self.backward, b, m, s], at[self.backward, a, m, s]
                yield *backward, edge.backward_bytes[s]
        firsts = [chunks[0] for chunks in work.chunks_of]
        for group, between in enumerate(work.between if self.has_between else ()):
            for source, size in between.receives:
                last = work.chunks_of[source][-1], batches[-1], slices[-1]
                left = at[TaskKind.FORWARD, *last]
                yield left, at[TaskKind.BETWEEN, firsts[group], 0, 0], size
