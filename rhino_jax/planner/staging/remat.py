"""The choice of what a submesh's backward passes recompute or fetch from host memory,
so that it fits or is faster: the residuals between its tasks as candidates, with costs.

A task is compiled separately: every value that another task reads is written to memory,
even if it would stay in registers in a single program.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.passes.remat.late import Halves, ResidualStack
from rhino_jax.passes.remat.rerun import again
from rhino_jax.passes.staged.holding import may_wait
from rhino_jax.passes.staged.remat import StagedRemat, in_ids_of_piece
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.passes.staged.step import StagedStep, TaskKind, ValueKind
from rhino_jax.pipeline.offload import MOVING
from rhino_jax.plan.stages import StageRemat
from rhino_jax.planner.decision import MIN_GAIN, Decision, NotFaster
from rhino_jax.planner.search.records import LIMITS
from rhino_jax.planner.search.remat.candidates import ResidualReader
from rhino_jax.planner.search.remat.choice import Chosen, RematQuestion, RematRow, ask
from rhino_jax.planner.staging.planned import (
    MAX_TRIES,
    PlannedGroup,
    Refused,
    Room,
)
from rhino_jax.planner.staging.shapes import SubmeshSearches
from rhino_jax.planner.variants import EFFORT, MIN_MORE, RematTries
from rhino_jax.rewrite.flat import FlatRegion
from rhino_jax.solver.remat.question import SavedValue, coarse


class AskingTasks(ResidualReader):
    """Read candidates off the tasks of a stage.

    Every value that crosses from task to task is stored, and may be recomputed if a
    forward task computes it.
    """

    def __init__(self, group: PlannedGroup, in_flight: int) -> None:
        of, program = group.of, group.of.program
        self.group, self.in_flight = group, in_flight
        self.beside = dict[int, int]()
        kinds = {op: t.kind for t, op in zip(of.tasks, program.body.ops, strict=True)}
        self.forward = [op for op, kind in kinds.items() if kind is TaskKind.FORWARD]
        self.keeps_stacks = TaskKind.WEIGHT_GRADIENT in kinds.values()
        ops = [*program.body.ops]
        # The calls that run before all forward passes.
        self.before = ops[: ops.index(self.forward[0]) if self.forward else 0]
        super().__init__(group.found.best)
        self.is_held = self.model.analysis.liveness.is_held
        self.bound = frozenset()
        # (Key, the task's call or -1, value) of arguments and of tasks' results.
        ends = zip(of.arguments, program.inputs, strict=True)
        self.ends = [(key, -1, end.value) for key, end in ends]
        self.received = {v for key, _, v in self.ends if key.kind is ValueKind.INSIDE}
        self.ends += [
            (key, op, v)
            for task, op in zip(of.tasks, ops, strict=True)
            for key, v in zip(task.makes, program.ops[op].results, strict=True)
        ]
        # Values that may be recomputed: not those that micro-batches sum up.
        self.free = {
            v
            for line in self.block.ops
            if line.within and line.within[0].op.id in self.forward
            for v in line.results
        }
        self.free -= {
            self.block.named(v)
            for key, op, v in self.ends
            if op in self.forward and key.kind is ValueKind.SUM
        }
        self.hosted = set[int]()
        self.host_bytes_per_s = 0.0

    def offload(self, host_bytes_per_s: float) -> None:
        """Let values be offloaded over a device's link to host memory."""
        group = self.group
        keys = may_wait(group.of.tasks, group.step.received(group.group))
        named = {self.block.named(v) for key, _, v in self.ends if key in keys}
        self.hosted = named & (self.free | self.received)
        self.host_bytes_per_s = host_bytes_per_s

    def _sources(self, stored: Collection[int]) -> list[int]:
        """Return results of matmuls, which are in memory anyway: such as attention's
        scores, from which its exponentials are recomputed."""
        free = (v for v in stored if v in self.free and v not in self.stacks)
        return self._products(free, {*stored, *self.bound})

    @property
    def most_saved_s(self) -> float:
        """Seconds to write and read all stacked residuals, and all values that would
        stay in registers but for the border between tasks."""
        stacks = [s for s in self.stacks.values() if self._may_go(s)]
        plain = (v for v in self._kept() if v in self.free and v not in self.stacks)
        stacks_s = self.device.stack_passes * sum(map(self._pass_s, stacks))
        return stacks_s + 2 * sum(map(self._border_s, plain))

    def _border_s(self, value: int) -> float:
        """Return the seconds of all writes of a value that could stay in registers."""
        port = self.model.graph.held.get(value)
        if port is None or port.id not in self.model.analysis.liveness.handed:
            return 0.0
        return self.micro_batches * self._memory_s(self._bytes(value))

    def _may_go(self, stack: ResidualStack) -> bool:
        return stack.value in self.free and not self.keeps_stacks

    def _pass_s(self, stack: ResidualStack) -> float:
        # All micro-batches are counted, as in other seconds.
        within = self.block.ops[stack.loop].within
        task = within[0].op.call if within else None
        times = task.trip_count if task is not None else 1
        return times * super()._pass_s(stack)

    def _halves(self) -> Halves:
        early = {*self.before, *self.forward}
        lines = self.flat.top.ops
        is_late = [
            not line.within or line.within[0].op.id not in early for line in lines
        ]
        return Halves(self.flat.top, is_late)

    def asked(self) -> RematQuestion:
        """Return the remat problem with residuals of all micro-batches in flight."""
        found = super().asked()
        question, inputs = found.question, {*self.block.inputs}
        # Values of one micro-batch, as those of loops' bodies are.
        of_one = self.free | self.received
        candidates = tuple(
            self._held(c, self.beside.get(v, 0))
            if v in of_one or (v not in self.block.maker and v not in inputs)
            else c
            for v, c in zip(found.values, question.candidates, strict=True)
        )
        question = replace(question, candidates=candidates, beside_s=self._beside_s())
        # Late times become a few, and operands that are recomputed within one of them
        # are live one after the other.
        if (few := coarse(question, LIMITS.late_times)) is not question:
            plain = (replace(c, extra_bytes=0) for c in few.candidates)
            question = replace(few, candidates=tuple(plain))
        # A stage's choice saves all slices of a stack, or none.
        return replace(found, question=question, is_ordered=False, parts=1)

    def _beside_s(self) -> float:
        """Return the seconds of the shorter pass of all micro-batches: the time that
        offload and fetch may each take concurrently with compute."""
        if not self.hosted:
            return 0.0
        passes = [0.0, 0.0]
        for line, is_late in zip(self.block.ops, self.halves.is_late, strict=True):
            task = line.within[0].op if line.within else None
            if task is None or task.id in self.before or task.call is None:
                continue
            if task.call.trip_count == self.micro_batches:
                passes[is_late] += self._line_s(line)
        return min(passes)

    def _sent(self, row: RematRow) -> RematRow:
        """Return a candidate that may be offloaded: it is written to device memory
        first, and copies read and write that, whatever runs concurrently."""
        if row.value not in self.hosted:
            return replace(row, offload_s=None)
        size = self.micro_batches * self._bytes(row.value)
        link_s = size / self.host_bytes_per_s
        offload_s = row.save_s + 2 * self._memory_s(size)
        return replace(row, offload_s=offload_s, link_s=link_s)

    @property
    def micro_batches(self) -> int:
        """Number of runs of the calls of forward tasks."""
        ops = (self.program.ops[i] for i in self.forward)
        return max((o.call.trip_count for o in ops if o.call is not None), default=1)

    def _held(self, c: SavedValue, beside: int) -> SavedValue:
        """Return a candidate as a task's argument, which is live from the task's start
        to its end."""
        own = c.bytes if c.remat_bytes is None else c.remat_bytes
        always, moving = (
            count * c.bytes for count in (self.in_flight, min(self.in_flight, MOVING))
        )
        return replace(
            c,
            bytes=0,
            remat_bytes=own,
            always_bytes=always,
            sent_bytes=moving,
            extra_bytes=beside,
        )

    def _layer(self, node: int) -> tuple[int | None, int]:
        return None, 0  # Values of a stage's few layers are chosen one by one.

    def _is_stored(self, value: int) -> bool:
        return value in self.model.graph.held

    def _is_in_memory(self, value: int) -> bool:
        port = self.model.graph.held[value]
        is_op = self.model.graph.nodes[port.node].kind is NodeKind.OP
        return not is_op or bool(self.is_held[port.id])

    def _row(self, value: int, kept: set[int], uses: set[int]) -> RematRow:
        row = super()._row(value, kept, uses)
        if value in self.stacks:
            return self._sent(row)
        if value not in self.free:
            return self._sent(replace(row, remat_s=None))
        border_s = self._border_s(value)
        row = replace(row, save_s=2 * border_s)
        if row.remat_s is not None:
            lines = self._again(value, kept - {value}).lines
            gone_s = self._gone_s(self.block, lines, self.block.outputs)
            # The largest temporary while it is recomputed.
            made = {v for k in lines for v in self.block.ops[k].results} - {value}
            stored = (v for v in made if self._is_stored(v) and self._is_in_memory(v))
            self.beside[value] = max(map(self._bytes, stored), default=0)
            # Its cost in the plan includes the write to memory.
            remat_s = max(row.remat_s - gone_s - border_s, 0.0)
            row = replace(row, remat_s=remat_s)
        # A recomputed value is computed where it is read, as in a single program.
        is_held = self._is_in_memory(value)
        return self._sent(row if is_held else replace(row, remat_bytes=0))

    def _stack_row(self, stack: ResidualStack, uses: set[int]) -> RematRow:
        row = super()._stack_row(stack, uses)
        if not self._may_go(stack):
            return replace(row, remat_s=None)
        if row.remat_s is None:
            return row
        body = self.block.ops[stack.loop].regions[0]
        mine = [s for s in self.stacks.values() if s.loop == stack.loop]
        others = {s.inside for s in mine if s.inside != stack.inside}
        lines = again(self.program, body, [stack.inside], others).lines
        carried = self.block.ops[stack.loop].call.num_carry
        left = [v for v in body.outputs[carried:] if v != stack.inside]
        gone_s = self._gone_s(body, lines, (*body.outputs[:carried], *left))
        return replace(row, remat_s=max(row.remat_s - gone_s, 0.0))

    def _gone_s(
        self, block: FlatRegion, lines: Sequence[int], outputs: Collection[int]
    ) -> float:
        """Return the seconds of equations that need not run in the forward pass once
        they run in the backward pass.

        Args:
          block: the region of the equations.
          lines: equations that run in the backward pass.
          outputs: values that the forward equations are for, other than recomputed
            ones.
        """
        readers: dict[int, set[int]] = defaultdict(set)  # in the forward pass
        is_top = block is self.block
        for k, line in enumerate(block.ops):
            for v in () if is_top and self.halves.is_late[k] else line.operands:
                readers[v].add(k)
        needed, gone = {*outputs}, set[int]()
        for k in reversed(lines):
            makes = block.ops[k].results
            read = set().union(*(readers[v] for v in makes))
            if needed.isdisjoint(makes) and read <= gone:
                gone.add(k)
        return sum(self._line_s(block.ops[k]) for k in gone)

    def _carried(self, rows: list[RematRow]) -> list[RematRow]:
        return [*super()._carried(rows), *self._received(rows)]

    def _loops(self, rows: list[RematRow]) -> dict[int, tuple[int, tuple[int, ...]]]:
        made = [row for row in rows if row.value not in self.received]
        assert rows[len(rows) - len(made) :] == made, "what is received comes first"
        first = len(rows) - len(made)
        return {
            loop: (count, tuple(first + i for i in members))
            for loop, (count, members) in super()._loops(made).items()
        }

    def _received(self, rows: Collection[RematRow]) -> list[RematRow]:
        """Return inputs that only recomputation reads in the backward pass; and inputs
        that may be offloaded."""
        read = {v for row in rows for v in row.needs} & self.received
        late: dict[int, set[int]] = {}
        for line, is_late in zip(self.block.ops, self.halves.is_late, strict=True):
            for v in line.operands if is_late else ():
                late.setdefault(v, set()).update(self._times(line))
        hosted = self.hosted & self.received & late.keys()
        asked = sorted(v for v in (read - late.keys()) | hosted)
        uses = {v: tuple(sorted(late[v] - {0})) for v in hosted}
        return [
            self._sent(
                RematRow(self._bytes(v), 0, uses.get(v, ()), place=(-1, k), value=v)
            )
            for k, v in enumerate(asked)
            if v in self.model.graph.held
        ]


FORWARD = TaskKind.FORWARD

StepOf = Callable[[StagedRemat], StagedStep]
"""Remat → the tasks of a step; those of other submeshes stay as they are."""


Planned = tuple[PlannedGroup, StagedRemat]
"""A planned submesh, and the remat of all submeshes."""


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
                return self.planned(step, group, MAX_TRIES), remat
            if way == "faster":
                return self._faster(group, remat, tried.plans["saved"][0])
            found = self._values(group, remat, wide) if wide else None
            if found is not None:
                return found
            again = replace(remat, chunks=remat.chunks | own)
            return self.planned(self.step_of(again), group, MAX_TRIES), again

        tried = Decision(make, (Refused,), lambda planned: (_seconds(planned[0]),))
        saved, refused = tried.plan("saved"), tried.left.get("saved")
        wide = saved[0].wide if saved else None
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
        if saved is None or (may_recompute and saved[0].is_bound):
            tried.plan("fitting")
            refused = tried.left.get("fitting")
            if saved is None and isinstance(refused, Refused):
                raise in_vain(refused.error) from None
        if saved is not None and is_free and tried.taken() is saved:
            tried.plan("faster")
        return tried.taken()

    def _faster(self, group: int, remat: StagedRemat, kept: PlannedGroup) -> Planned:
        """Plan a submesh that fits with values recomputed that take less time so.

        Raises:
          NotFaster: there are none.
          Refused: it does not fit.
        """
        kinds = {task.kind for task in kept.of.tasks}
        if self.sides is None or FORWARD not in kinds:
            raise NotFaster(math.inf)
        keeps_stacks = TaskKind.WEIGHT_GRADIENT in kinds
        known, key = self.finds.faster, (kept.found, keeps_stacks)
        if key not in known:
            asking = AskingTasks(kept, self.room.in_flight[group])
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
        return again

    def _with(
        self, chosen: Chosen, group: int, remat: StagedRemat, kept: PlannedGroup
    ) -> Planned | None:
        """Plan a submesh with a choice of values, with its gain over saving all; None
        where the micro-batch has none of these values.

        Raises:
          Refused: it does not fit.
        """
        assert self.sides is not None
        text = in_ids_of_piece(chosen.choice, kept.of, self.sides())
        if not text:
            return None
        remat = remat.with_values(group, text)
        one = self.planned(self.step_of(remat), group, 1)
        one = replace(one, waits_s=self._waits_s(one))
        flying = self.room.in_flight[group]
        said = StageRemat(
            choice=text,
            count=len(RematChoice.parse(text).recompute),
            saved_bytes=flying * kept.left_bytes - one.flying_bytes(flying),
            added_s=(_seconds(one) - _seconds(kept)) / one.step.micro_batches,
            offloaded=len(one.step.waits_on_host(group)),
        )
        return replace(one, remat=said), remat

    def _values(
        self, group: int, remat: StagedRemat, wide: PlannedGroup
    ) -> Planned | None:
        """Plan a submesh with the cheapest choice of values with which it fits."""
        if self.sides is None or all(t.kind is not FORWARD for t in wide.of.tasks):
            return None
        asking = AskingTasks(wide, self.room.in_flight[group])
        if self.room.host_bytes_per_s:
            asking.offload(self.room.host_bytes_per_s)
        asked = asking.asked()
        less = self._lacks(wide)
        more = MIN_MORE * self.budget_bytes
        tries = RematTries(asked, asked.all_saved.peak_bytes - less, more)
        for choices in tries:
            try:
                return self._with(choices[0], group, remat, wide)
            except Refused as refused:
                if refused.wide is None:
                    return None
                tries.lacks_bytes = self._lacks(refused.wide)
        return None

    def _waits_s(self, group: PlannedGroup) -> float:
        """Return the seconds of transfers to and from the host that the shorter of both
        passes does not hide."""
        size = group.offloaded_bytes()
        if not size or not self.room.host_bytes_per_s:
            return 0.0
        passes_s = (
            sum(s for task, s in group.timed if task.kind is kind)
            for kind in (FORWARD, TaskKind.BACKWARD)
        )
        link_s = group.step.micro_batches * size / self.room.host_bytes_per_s
        return max(0.0, link_s - min(passes_s))

    def _lacks(self, group: PlannedGroup) -> int:
        """Return the bytes by which a submesh exceeds the budget."""
        needed = group.peak_bytes(self.room.in_flight[group.group])
        ahead = self.room.ahead_bytes[group.group]
        return int(needed + ahead - self.budget_bytes) + 1


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
