"""Families of schedules, and the tools to build their orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.graph import graph_of
from rhino_jax.pipeline.tasks import Key, PassKind, Schedule, TaskGraph
from rhino_jax.pipeline.work import StepWork


@dataclass(frozen=True, slots=True)
class Family:
    """A named rule that orders the tasks of a pipeline.

    Attributes:
      name: name in users' code.
      summary: description in one sentence.
      source: publication that describes it.
      build: function from costs of the stages, and options, to a schedule.
    """

    name: str
    summary: str
    source: str
    build: Callable[..., Schedule]


def in_order(
    name: str,
    work: StepWork,
    orders: Sequence[Sequence[Key]],
    *,
    is_split: bool = False,
    is_forward_only: bool = False,
) -> Schedule:
    """Build a schedule from every group's order of micro-batch tasks.

    Tasks of the whole step are added after it, and tasks ahead of forward passes
    before.

    Raises:
      ScheduleError: micro-batches are coupled, and backward passes start before all
        forward passes are done.
    """
    if work.between and not is_forward_only:
        orders = [_met(name, work, group, order) for group, order in enumerate(orders)]
    graph = graph_of(work, is_split=is_split, is_forward_only=is_forward_only)
    return Schedule(
        name,
        graph,
        tuple(
            (
                *(i for step in order for i in _with_loss(graph, step)),
                *_last(graph, group),
            )
            for group, order in enumerate(orders)
        ),
    )


def _met(name: str, work: StepWork, group: int, order: Sequence[Key]) -> list[Key]:
    """Insert the whole batch's task before the first backward pass of an order.

    Tasks ahead of forward passes come first, if there are any.
    """
    chunks = work.chunks_of[group]
    batches, slices = range(work.micro_batches), range(work.slices)
    passes = (PassKind.BACKWARD, PassKind.INPUT_GRADIENT)
    first = next(i for i, key in enumerate(order) if key[0] in passes)
    late = [key for key in order[first:] if key[0] is PassKind.FORWARD]
    if late and not work.is_twice:
        raise ScheduleError(
            f"`{name}` starts backward passes before all forward passes are done: here"
            " they read what the whole batch makes.",
            where="`schedule=`",
            numbers=f"{work.micro_batches} micro-batches, coupled; {len(late)} forward"
            f" passes of group {group} come later",
            fix='take "gpipe", or "auto".',
        )
    ahead = [(PassKind.AHEAD, c, m, s) for c in chunks for m in batches for s in slices]
    between = (PassKind.BETWEEN, chunks[0], 0, 0)
    return [
        *ahead[: len(ahead) * work.is_twice],
        *order[:first],
        between,
        *order[first:],
    ]


def _with_loss(graph: TaskGraph, step: Key) -> tuple[int, ...]:
    """Return a task, followed by its loss task if there is one."""
    kind, chunk, batch, part = step
    is_forward = kind is PassKind.FORWARD
    loss = graph.by_key.get((PassKind.LOSS, chunk, batch, part)) if is_forward else None
    return (graph.by_key[step],) if loss is None else (graph.by_key[step], loss)


def _last(graph: TaskGraph, group: int) -> list[int]:
    """Return the exchange and update tasks of a group."""
    return [
        i
        for i, task in enumerate(graph.tasks)
        if task.group == group and task.kind in (PassKind.EXCHANGE, PassKind.UPDATE)
    ]


def forward(chunk: int, micro_batch: int, slices: int = 1) -> list[Key]:
    return [(PassKind.FORWARD, chunk, micro_batch, s) for s in range(slices)]


def backward(
    chunk: int, micro_batch: int, slices: int = 1, kind: PassKind = PassKind.BACKWARD
) -> list[Key]:
    """Return backward tasks, later slices first: earlier ones wait for their gradients.

    Those are gradients of the keys and values that later slices read.
    """
    return [(kind, chunk, micro_batch, s) for s in reversed(range(slices))]


def need_one_chunk(name: str, work: StepWork) -> None:
    """Refuse groups with several chunks, or out of order."""
    if not work.is_one_chunk_each:
        raise ScheduleError(
            f"`{name}` runs one chunk in every group.",
            numbers=f"{len(work.chunks)} chunks in {work.groups} groups",
            fix="take `interleaved`, `zero-bubble-v` or `searched`, or one chunk each.",
        )
    if not work.is_loop:
        raise ScheduleError(
            f"`{name}` runs chunk 0 in group 0, and so on.",
            where=f"groups of chunks: {[c.group for c in work.chunks]}",
            fix="number groups along the forward pass.",
        )
