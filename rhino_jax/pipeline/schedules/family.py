"""Families of schedules, and the tools to build their orders."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.graph import graph_of
from rhino_jax.pipeline.tasks import Key, Schedule, TaskGraph, TaskKind
from rhino_jax.pipeline.work import StepWork


CHUNKS = 2
"""Chunks per group, where there are several: the number of ZB-V, and the smallest that
makes bubbles smaller; more send more."""


class Placement(enum.Enum):
    """The groups that chunks run on, in order of the forward pass.

    ONE: one chunk on each.
    ROUND: several on each, round-robin.
    BACK: two on each, up to the last group and back.
    """

    ONE = "one"
    ROUND = "round"
    BACK = "back"

    def of(self, groups: int) -> tuple[int, ...]:
        """Return the group of every chunk."""
        there = tuple(range(groups))
        if self is Placement.BACK:
            return there + there[::-1]
        return there * CHUNKS if self is Placement.ROUND else there


@dataclass(frozen=True, slots=True)
class Family:
    """A named rule that orders the tasks of a pipeline.

    Attributes:
      name: name in users' code.
      summary: description in one sentence.
      source: publication that describes it.
      build: function from costs of the stages, and options, to a schedule.
      placements: those that it is for.
      is_split: whether it may split backward passes into two tasks.
      in_slices: whether it runs slices of sequences, and nothing else.
      has_backward: whether it runs a whole training step.
    """

    name: str
    summary: str
    source: str
    build: Callable[..., Schedule]
    placements: tuple[Placement, ...] = (Placement.ONE,)
    is_split: bool = False
    in_slices: bool = False
    has_backward: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether it runs one chunk per group, with whole backward passes."""
        is_one = self.placements == (Placement.ONE,) and not self.in_slices
        return is_one and self.has_backward and not self.is_split

    def suits(self, work: StepWork) -> bool:
        """Whether it runs steps that are cut like this one, with backward passes."""
        placement = Placement.BACK if work.is_v else Placement.ROUND
        if work.is_one_chunk_each:
            placement = Placement.ONE
        return (
            self.has_backward
            and (self.in_slices or placement in self.placements)
            and self.in_slices == (work.slices > 1)
        )


FAMILIES: dict[str, Family] = {}
"""All families by name, in the order of their registration."""


def family(
    name: str, summary: str, source: str = "", **facts: Any
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Return a decorator that registers a function as the `build` of a family.

    Args:
      name, summary, source, **facts: attributes of `Family`.
    """

    def wrap(build: Callable[..., Schedule]) -> Callable[..., Schedule]:
        FAMILIES[name] = Family(name, summary, source, build, **facts)
        return build

    return wrap


def in_order(
    name: str,
    work: StepWork,
    orders: Sequence[Sequence[Key]],
    *,
    is_split: bool = False,
    is_forward_only: bool = False,
) -> Schedule:
    """Build a schedule from every group's order of micro-batch tasks.

    Tasks of the whole step are added after it.

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
                *(graph.by_key[step] for step in order),
                *_updates(graph, group),
            )
            for group, order in enumerate(orders)
        ),
    )


def _met(name: str, work: StepWork, group: int, order: Sequence[Key]) -> list[Key]:
    """Insert the whole batch's task before the first backward pass of an order."""
    passes = (TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT)
    first = next(i for i, key in enumerate(order) if key[0] in passes)
    late = [key for key in order[first:] if key[0] is TaskKind.FORWARD]
    if late:
        raise ScheduleError(
            f"`{name}` starts backward passes before all forward passes are done: here"
            " they read what the whole batch makes.",
            where="`schedule=`",
            numbers=f"{work.micro_batches} micro-batches, coupled; {len(late)} forward"
            f" passes of group {group} come later",
            fix='take "gpipe", or "auto".',
        )
    between = (TaskKind.BETWEEN, work.chunks_of[group][0], 0, 0)
    return [*order[:first], between, *order[first:]]


def _updates(graph: TaskGraph, group: int) -> list[int]:
    """Return the update task of a group, if there is one."""
    return [
        i
        for i, task in enumerate(graph.tasks)
        if task.group == group and task.kind is TaskKind.UPDATE
    ]


def forward(chunk: int, micro_batch: int, slices: int = 1) -> list[Key]:
    return [(TaskKind.FORWARD, chunk, micro_batch, s) for s in range(slices)]


def backward(
    chunk: int, micro_batch: int, slices: int = 1, kind: TaskKind = TaskKind.BACKWARD
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
