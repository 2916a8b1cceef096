"""The choice of what a submesh's backward passes recompute or fetch from host memory,
so that it fits or is faster."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.passes.staged.holding import may_wait
from rhino_jax.passes.staged.remat import StagedRemat, in_ids_of_piece
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.passes.staged.step import StagedStep, TaskKind, ValueKind
from rhino_jax.plan.stages import StageRemat
from rhino_jax.planner.decision import MIN_GAIN, Decision, NotFaster
from rhino_jax.planner.remat import EFFORT, MIN_MORE, RematTries
from rhino_jax.planner.search.remat.choice import Chosen, ask
from rhino_jax.planner.search.remat.tasks import AskingTasks, Tasks
from rhino_jax.planner.staging.planned import (
    MAX_TRIES,
    PlannedGroup,
    Refused,
    Room,
)
from rhino_jax.planner.staging.shapes import SubmeshSearches


FORWARD, BACKWARD = TaskKind.FORWARD, TaskKind.BACKWARD

StepOf = Callable[[StagedRemat], StagedStep]
"""Remat → the tasks of a step; those of other submeshes stay as they are."""


Planned = tuple[StagedStep, PlannedGroup, StagedRemat]
"""Tasks, a planned submesh, and the remat of all submeshes."""


@dataclass(frozen=True, eq=False)
class StageRematSearch:
    """Choose the values that submeshes recompute or offload.

    Attributes:
      step_of: remat → the tasks of all submeshes.
      sides: passes of a micro-batch; None where values are not chosen one by one.
      planned: (tasks, submesh, number of tries) → the planned submesh.
      room: the memory to set aside.
      budget_bytes: the memory budget of a device.
      finds: results of searches of submeshes of this step.
    """

    step_of: StepOf
    sides: Callable[[], Sides] | None
    planned: Callable[[StagedStep, int, int], PlannedGroup]
    room: Room
    budget_bytes: float
    finds: SubmeshSearches

    def of(self, step: StagedStep, group: int, remat: StagedRemat) -> Planned:
        """Plan a submesh so that it fits; or, where that is clearly faster than saving
        all residuals, with the cheapest values recomputed with which it fits, with all
        of its forward passes recomputed, or with values that take less time so.

        Args:
          step: the tasks of all submeshes, without values that this one recomputes.
          group: the submesh.
          remat: the remat of the others.
        Raises:
          InfeasiblePlanError: it does not fit in any way.
        """
        room = self.room
        own = {c for c, g in enumerate(step.chunks) if g == group}
        is_free = room.may_recompute and not own <= remat.chunks
        may_recompute = is_free and not room.is_split

        def make(way: str) -> Planned:
            if way == "saved":
                return step, self.planned(step, group, MAX_TRIES), remat
            if way == "faster":
                return self._faster(step, group, remat, tried.plans["saved"][1])
            found = self._values(step, group, remat, wide) if wide else None
            if found is not None:
                return found
            again = remat.with_chunks(frozenset(own))
            other = self.step_of(again)
            return other, self.planned(other, group, MAX_TRIES), again

        tried = Decision(make, (Refused,), lambda planned: (_seconds(planned[1]),))
        saved, refused = tried.plan("saved"), tried.left.get("saved")
        wide = saved[1].wide if saved else None
        if isinstance(refused, Refused):
            wide, error = refused.wide, refused.error
            if own <= remat.chunks:
                raise in_vain(error) from None
            # Remat does not lower the peak of one micro-batch alone.
            if refused.is_alone or not (may_recompute or room.would_recompute):
                raise error from None
            if not may_recompute:
                raise InfeasiblePlanError(
                    error.what,
                    where=error.where,
                    numbers=error.numbers,
                    fix=f"{error.fix.rstrip('.')}, or {room.would_recompute}: stages"
                    " then run their forward passes again where that makes them fit.",
                ) from None
        if saved is None or (may_recompute and saved[1].is_bound):
            tried.plan("fitting")
            refused = tried.left.get("fitting")
            if saved is None and isinstance(refused, Refused):
                raise in_vain(refused.error) from None
        if saved is not None and is_free and tried.taken() is saved:
            tried.plan("faster")
        return tried.taken()

    def _faster(
        self, step: StagedStep, group: int, remat: StagedRemat, kept: PlannedGroup
    ) -> Planned:
        """Plan a submesh that fits with values recomputed that take less time so.

        Raises:
          NotFaster: there are none.
          Refused: it does not fit.
        """
        tasks = self._tasks(kept, group)
        if self.sides is None or not tasks.forward:
            raise NotFaster(math.inf)

        known, key = self.finds.faster, (kept.found, tasks.keeps_stacks)
        if key not in known:
            asking = AskingTasks(kept.found.best, tasks)
            least_s, found = MIN_GAIN * _seconds(kept), list[Chosen]()
            if asking.most_saved_s >= least_s:
                asked = asking.asked()
                most_s = asked.all_saved.added_s - least_s
                found = ask(asked, math.inf, effort=EFFORT)
                found = [c for c in found if c.answer.added_s <= most_s]
            known[key] = found[0] if found else None
        chosen = known[key]
        again = chosen and self._with(chosen, group, remat, kept)
        if not again:
            raise NotFaster(math.inf)
        return self._planned(*again, group, (step, kept))

    def _with(
        self, chosen: Chosen, group: int, remat: StagedRemat, kept: PlannedGroup
    ) -> tuple[StagedStep, StagedRemat] | None:
        """Return the tasks of all submeshes with a choice of values for one; None where
        the micro-batch has none of these values."""
        assert self.sides is not None
        text = in_ids_of_piece(chosen.choice, kept.of, self.sides())
        if not text:
            return None
        again = remat.with_values(group, text)
        return self.step_of(again), again

    def _planned(
        self,
        step: StagedStep,
        remat: StagedRemat,
        group: int,
        kept: tuple[StagedStep, PlannedGroup],
    ) -> Planned:
        """Plan a submesh with a choice of values, with its gain over saving all.

        Raises:
          Refused: it does not fit.
        """
        one = self.planned(step, group, 1)
        one = replace(one, waits_s=self._waits_s(step, one))
        text, flying = remat.values[group], self.room.in_flight[group]
        before = flying * kept[1].left_bytes(kept[0])
        said = StageRemat(
            choice=text,
            count=len(RematChoice.parse(text).recompute),
            saved_bytes=before - one.flying_bytes(step, flying),
            added_s=(_seconds(one) - _seconds(kept[1])) / step.micro_batches,
            offloaded=len(step.waits_on_host(group)),
        )
        return step, replace(one, remat=said), remat

    def _values(
        self, step: StagedStep, group: int, remat: StagedRemat, wide: PlannedGroup
    ) -> Planned | None:
        """Plan a submesh with the cheapest choice of values with which it fits."""
        tasks = self._tasks(wide, group)
        if rate := self.room.host_bytes_per_s:
            # Results of calls, and arguments, that may be offloaded.
            of, program = wide.of, wide.of.program
            keys = may_wait(of.tasks, step.received(group))
            ends = [
                *zip(of.arguments, (end.value for end in program.inputs), strict=True)
            ]
            for task, op_id in zip(of.tasks, program.body.ops, strict=True):
                ends += zip(task.makes, program.ops[op_id].results, strict=True)
            hosted = frozenset(value for key, value in ends if key in keys)
            tasks = replace(tasks, hosted=hosted, host_bytes_per_s=rate)
        if self.sides is None or not tasks.forward:
            return None
        asked = AskingTasks(wide.found.best, tasks).asked()
        less = self._lacks(step, wide, group)
        more = MIN_MORE * self.budget_bytes
        tries = RematTries(asked, asked.all_saved.peak_bytes - less, more)
        for choices in tries:
            found = self._with(choices[0], group, remat, wide)
            if found is None:
                return None
            try:
                return self._planned(*found, group, (step, wide))
            except Refused as refused:
                if refused.wide is None:
                    return None
                tries.lacks_bytes = self._lacks(found[0], refused.wide, group)
        return None

    def _waits_s(self, step: StagedStep, group: PlannedGroup) -> float:
        """Return the seconds of transfers to and from the host that the shorter of both
        passes does not hide."""
        size = group.offloaded_bytes(step)
        if not size or not self.room.host_bytes_per_s:
            return 0.0
        passes = {k: 0.0 for k in (FORWARD, BACKWARD)}
        for task, seconds in group.timed():
            if task.kind in passes:
                passes[task.kind] += seconds
        link_s = step.micro_batches * size / self.room.host_bytes_per_s
        return max(0.0, link_s - min(passes.values()))

    def _lacks(self, step: StagedStep, group: PlannedGroup, at: int) -> int:
        """Return the bytes by which a submesh exceeds the budget."""
        needed = group.peak_bytes(step, self.room.in_flight[at])
        return int(needed + self.room.ahead_bytes[at] - self.budget_bytes) + 1

    def _tasks(self, group: PlannedGroup, at: int) -> Tasks:
        of, program = group.of, group.of.program
        pairs = [*zip(of.tasks, program.body.ops, strict=True)]
        ends = zip(of.arguments, program.inputs, strict=True)
        forward = [i for i, t in enumerate(of.tasks) if t.kind is TaskKind.FORWARD]
        made = (
            zip(of.tasks[i].makes, program.ops[pairs[i][1]].results, strict=True)
            for i in forward
        )
        made_by_all = (v for of in made for key, v in of if key.kind is ValueKind.SUM)
        return Tasks(
            frozenset(op for _, op in pairs[: min(forward, default=0)]),
            frozenset(pairs[i][1] for i in forward),
            frozenset(made_by_all),
            frozenset(end.value for key, end in ends if key.kind is ValueKind.INSIDE),
            self.room.in_flight[at],
            keeps_stacks=any(t.kind is TaskKind.WEIGHT_GRADIENT for t in of.tasks),
        )


def in_vain(error: InfeasiblePlanError) -> InfeasiblePlanError:
    """Return the error of a submesh that recomputes its forward passes already."""
    return InfeasiblePlanError(
        f"{error.what} Its backward passes run its forward passes again already.",
        where=error.where,
        numbers=error.numbers,
        fix=error.fix,
    )


def _seconds(group: PlannedGroup) -> float:
    return group.plan.predicted.step_time_s + group.waits_s
