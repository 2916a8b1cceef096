"""Families of schedules, and the tools to build their orders."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.graph import graph_of
from rhino_jax.pipeline.tasks import Schedule, TaskKind
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
      build: function from costs of the stages, and options, to a schedule.
      placements: those that it is for.
      is_split: whether it may split backward passes into two tasks.
      in_slices: whether it runs slices of sequences, and nothing else.
      has_backward: whether it runs a whole training step.
    """

    name: str
    summary: str
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
    name: str, summary: str, **facts: Any
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Return a decorator that registers a function as the `build` of a family.

    Args:
      name, summary, **facts: attributes of `Family`.
    """

    def wrap(build: Callable[..., Schedule]) -> Callable[..., Schedule]:
        FAMILIES[name] = Family(name, summary, build, **facts)
        return build

    return wrap


Step = tuple[TaskKind, int, int]
"""(kind, chunk, micro-batch) of the tasks of all its slices."""

FORWARD, BACKWARD = TaskKind.FORWARD, TaskKind.BACKWARD


def in_order(
    name: str,
    work: StepWork,
    order: Callable[[int], Iterable[Step]],
    *,
    is_split: bool = False,
    is_forward_only: bool = False,
) -> Schedule:
    """Build a schedule from every group's order of micro-batch tasks.

    Tasks of the whole step are added. In backward passes later slices come first, with
    the gradients of the keys and values that they read of earlier ones.

    Args:
      name: name of the schedule.
      work: costs of the stages.
      order: function of a group that returns its steps in order.
      is_split, is_forward_only: see `graph_of`.
    Raises:
      ScheduleError: micro-batches are coupled, and backward passes start before all
        forward passes are done.
    """
    graph = graph_of(work, is_split=is_split, is_forward_only=is_forward_only)
    slices, orders = range(work.slices), []
    for group, chunks in enumerate(work.chunks_of):
        steps = list(order(group))
        if work.between and not is_forward_only:
            first = next(i for i, s in enumerate(steps) if s[0] is not FORWARD)
            late = sum(kind is FORWARD for kind, *_ in steps[first:])
            if late:
                raise ScheduleError(
                    f"`{name}` starts backward passes before all forward passes are"
                    " done: here they read what the whole batch makes.",
                    where="`schedule=`",
                    numbers=f"{work.micro_batches} micro-batches, coupled; {late}"
                    f" forward passes of group {group} come later",
                    fix='take "gpipe", or "auto".',
                )
            steps.insert(first, (TaskKind.BETWEEN, chunks[0], 0))
        found = [
            graph.by_key[(*step, s)]
            for step in [*steps, (TaskKind.UPDATE, chunks[0], 0)]
            for s in (slices if step[0] is FORWARD else slices[::-1])
            if (*step, s) in graph.by_key
        ]
        orders.append(tuple(found))
    return Schedule(name, graph, tuple(orders))


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
