"""A group that does not fit: what its backward passes had better make again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.plan.stages import MadeAgain
from rhino_jax.planning.staging.auto import LEAST_GAIN
from rhino_jax.planning.staging.planned import (
    MOST_TRIES,
    PlannedGroup,
    Refused,
    Room,
)
from rhino_jax.search.keeping.in_flight import Tasks, choices_in_flight
from rhino_jax.transform.staged.remade import Remade, in_ids_of_piece
from rhino_jax.transform.staged.sides import Sides
from rhino_jax.transform.staged.step import Kind, Step, TaskKind


SECONDS = 2.0
"""For one choice of what is made again."""

MOST_CHOICES = 5
"""One after the other, each to save what a plan with the one before still lacks."""

LEAST_MORE = 0.01
"""Of the budget: with less, the next choice is the same again."""

StepOf = Callable[[Remade], Step]
"""From what is made again to the tasks of a step; those of other groups stay as they
are."""


@dataclass(frozen=True, eq=False)
class Remaking:
    """Chooses for groups what they make again.

    Attributes:
      step_of: all tasks.
      sides: of a micro-batch; None where values are not chosen one by one.
      planned: a group of a step planned, in so many tries.
      room: that groups need.
      budget_bytes: of a device.
    """

    step_of: StepOf
    sides: Callable[[], Sides] | None
    planned: Callable[[Step, int, int], PlannedGroup]
    room: Room
    budget_bytes: float

    def of(
        self,
        step: Step,
        group: int,
        remade: Remade,
        kept: PlannedGroup | None,
        wide: PlannedGroup | None,
    ) -> tuple[Step, PlannedGroup, Remade]:
        """A group that makes values again, whichever are the cheapest, or all of its
        forward passes; or as it is, where that fits and is about as fast.

        Args:
          step: all tasks, with all that the group has kept.
          group: which.
          remade: what others make again.
          kept: it as it is, if that fits.
          wide: it planned with room for one micro-batch.
        Raises:
          InfeasiblePlanError: it does not fit either way.
        """
        try:
            found = self._values(step, group, remade, wide) if wide else None
            found = found or self._all(step, group, remade)
        except Refused as refused:
            if kept is None:
                raise in_vain(refused.error) from None
            return step, kept, remade
        if kept is not None and _seconds(found[1]) >= (1 - LEAST_GAIN) * _seconds(kept):
            return step, kept, remade
        return found

    def _all(
        self, step: Step, group: int, remade: Remade
    ) -> tuple[Step, PlannedGroup, Remade]:
        own = {c for c, g in enumerate(step.chunks) if g == group}
        remade = remade.with_chunks(frozenset(own))
        step = self.step_of(remade)
        return step, self.planned(step, group, MOST_TRIES), remade

    def _values(
        self, step: Step, group: int, remade: Remade, wide: PlannedGroup
    ) -> tuple[Step, PlannedGroup, Remade] | None:
        """With the cheapest choice of values that makes it fit."""
        tasks = self._tasks(wide, group)
        if self.sides is None or not tasks.forward:
            return None
        less = self._lacks(step, wide, group)
        for _ in range(MOST_CHOICES):
            found = choices_in_flight(
                wide.found.solved[0], tasks, less, seconds=SECONDS
            )
            if not found:
                return None
            chosen = found[0]
            text = in_ids_of_piece(chosen.choice, wide.of, self.sides())
            again = remade.with_values(group, text)
            other = self.step_of(again)
            try:
                one = self.planned(other, group, 1)
            except Refused as refused:
                if refused.wide is None:
                    return None
                lacks = self._lacks(other, refused.wide, group)
                less += max(lacks, int(LEAST_MORE * self.budget_bytes))
                continue
            left = wide.left_bytes(step) - one.left_bytes(other)
            said = MadeAgain(
                choice=text,
                count=len(chosen.choice.recompute),
                saved_bytes=tasks.in_flight * left,
                added_s=(_seconds(one) - _seconds(wide)) / step.micro_batches,
            )
            return other, replace(one, made_again=said), again
        return None

    def _lacks(self, step: Step, group: PlannedGroup, at: int) -> int:
        """How much more it takes than there is."""
        needed = group.peak_bytes(step, self.room.in_flight[at])
        return int(needed + self.room.ahead_bytes[at] - self.budget_bytes) + 1

    def _tasks(self, group: PlannedGroup, at: int) -> Tasks:
        of, program = group.of, group.of.program
        pairs = [*zip(of.tasks, program.body.ops, strict=True)]
        ends = zip(of.arguments, program.inputs, strict=True)
        return Tasks(
            frozenset(op for t, op in pairs if t.kind is TaskKind.START),
            frozenset(op for t, op in pairs if t.kind is TaskKind.FORWARD and t.places),
            frozenset(end.value for key, end in ends if key.kind is Kind.INSIDE),
            self.room.in_flight[at],
        )


def in_vain(error: InfeasiblePlanError) -> InfeasiblePlanError:
    """Of a group that runs its forward passes again."""
    return InfeasiblePlanError(
        f"{error.what} Its backward passes run its forward passes again already.",
        where=error.where,
        numbers=error.numbers,
        fix=error.fix,
    )


def _seconds(group: PlannedGroup) -> float:
    return group.plan.predicted.step_time_s
