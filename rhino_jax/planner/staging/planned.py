"""One group, planned on its own devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.ir.spec import Spec
from rhino_jax.passes.staged.group import GroupProgram
from rhino_jax.passes.staged.holding import FIXED, TaskResiduals, is_once
from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.staging import NOTHING
from rhino_jax.passes.staged.step import StagedStep, ValueKey
from rhino_jax.pipeline.offload import MOVING
from rhino_jax.plan.pins.interior import ValuePin
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.stages import KEPT, MadeAgain
from rhino_jax.planner.meshes import MeshAxes
from rhino_jax.planner.search.driver import search_again
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.held import search_held
from rhino_jax.planner.search.records import Request
from rhino_jax.planner.staging.costs import seconds_by_op
from rhino_jax.planner.staging.group.alike import Finds
from rhino_jax.planner.staging.group.working import working_bytes
from rhino_jax.planner.variant_search import Search
from rhino_jax.runtime.tasks.held import held_bytes, held_specs
from rhino_jax.units import format_bytes


MAX_TRIES = 3
"""To make room for what micro-batches in flight leave."""

FIX = "take more micro-batches, more stages or more devices."

Pins = tuple[Mapping[int, Spec], Mapping[int, Spec], Mapping[int, ValuePin]]
"""Of arguments and of results, by position, and of values inside."""


class Refused(Exception):
    """A group does not fit.

    Attributes:
      error: what to say.
      is_alone: not even with one micro-batch, and nothing in flight.
      wide: planned with room for one.
    """

    def __init__(
        self,
        error: InfeasiblePlanError,
        *,
        is_alone: bool,
        wide: PlannedGroup | None = None,
    ) -> None:
        super().__init__(error)
        self.error, self.is_alone, self.wide = error, is_alone, wide


@dataclass(frozen=True, eq=False)
class PlannedGroup:
    """One group.

    Attributes:
      of: its tasks as one program.
      found: of that: the problem, and its solution.
      plan: the same, read back.
      specs: of everything that it has between tasks.
      seconds: predicted, of every op.
      tile: of its devices' memory.
      working: of every task, the bytes that it takes beyond what is held anyway.
      is_bound: whether it could be faster with more memory.
      wide: the group planned with room for one micro-batch, which holds too much.
      made_again: what its backward passes make again, if values are chosen for that.
      waits_s: estimated, of a step, for what is in the host's memory.
    """

    of: GroupProgram
    found: SearchResult
    plan: PlanData
    specs: Mapping[ValueKey, Spec]
    seconds: Mapping[int, float]
    tile: tuple[int, ...] = ()
    working: tuple[int, ...] = ()
    is_bound: bool = False
    wide: PlannedGroup | None = None
    made_again: MadeAgain = KEPT
    waits_s: float = 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.plan.mesh_axes)

    def bytes(self, step: StagedStep, key: ValueKey) -> int:
        """Of one device."""
        return held_bytes(step.types[key], self.specs[key], self.sizes, self.tile)

    def left_bytes(self, step: StagedStep) -> int:
        """What the forward pass of a micro-batch leaves for its backward pass."""
        return sum(self.held(step, chunk)[0] for chunk in self.chunks)

    def offloaded_bytes(self, step: StagedStep, chunk: int | None = None) -> int:
        """What of that waits in the host's memory; of a chunk, or of all."""
        tasks = self.of.tasks
        group = tasks[0].group
        sent = step.waits_on_host(group)
        left = TaskResiduals.of(tasks, step.received(group)).left if sent else {}
        return sum(
            self.bytes(step, key)
            for key, at in left.items()
            if key in sent and chunk in (None, at)
        )

    def flying_bytes(self, step: StagedStep, in_flight: int) -> int:
        """What it holds of so many micro-batches in flight; of what waits in the host's
        memory, of those on their way."""
        sent = self.offloaded_bytes(step)
        kept = self.left_bytes(step) - sent
        return in_flight * kept + min(in_flight, MOVING) * sent

    @property
    def chunks(self) -> tuple[int, ...]:
        """Of the model, those that it runs."""
        of = {t.place: None for t in self.of.tasks if t.is_per_micro_batch}
        return tuple(sorted(of))

    def held(self, step: StagedStep, chunk: int) -> tuple[int, int, int]:
        """Bytes of what a chunk's tasks leave for one another, of a micro-batch: see
        `TaskResiduals.of_chunk`."""
        tasks = self.of.tasks
        holding = TaskResiduals.of(tasks, step.received(tasks[0].group))
        left, kept, handed = holding.of_chunk(chunk)
        sizes = [sum(self.bytes(step, k) for k in ks) for ks in (left, kept, handed)]
        return sizes[0], sizes[1], sizes[2]

    def fixed_bytes(self, step: StagedStep) -> int:
        """What it holds all the time."""
        made = {key for task in self.of.tasks for key in task.makes}
        held = {*self.of.arguments, *made}
        return sum(self.bytes(step, key) for key in held if key.kind in FIXED)

    def working_bytes(self, chunk: int) -> int:
        """The most that a task of a chunk takes while it runs."""
        tasks = zip(self.of.tasks, self.working, strict=True)
        return max(
            (n for t, n in tasks if not is_once(t) and t.place == chunk), default=0
        )

    @property
    def update_bytes(self) -> int:
        """The most that what runs once a step takes."""
        tasks = zip(self.of.tasks, self.working, strict=True)
        return max((n for t, n in tasks if is_once(t)), default=0)

    def peak_bytes(self, step: StagedStep, in_flight: int) -> int:
        """The most that it holds, but for what arrives early.

        Args:
          in_flight: micro-batches of which its forward passes have left something.
        """
        working = max(self.working_bytes(chunk) for chunk in self.chunks)
        flying = self.flying_bytes(step, in_flight) + working
        return self.fixed_bytes(step) + max(flying, self.update_bytes)


@dataclass(frozen=True, slots=True)
class Room:
    """What groups have to hold beside what their tasks do.

    Attributes:
      in_flight: of every group, the micro-batches of which it holds something.
      ahead_bytes: of every group, of one device, what arrives early.
      may_recompute: whether groups that do not fit may make values again.
      is_split: whether their backward passes are: then values are made again only
        where that is faster.
      host_bytes_per_s: of a device's link to its host's memory, if values may wait
        there as well.
      would_recompute: the keyword with which they might, where they may not.
      remade: what they do, in any case.
    """

    in_flight: tuple[int, ...]
    ahead_bytes: tuple[int, ...]
    may_recompute: bool = False
    is_split: bool = False
    host_bytes_per_s: float | None = None
    would_recompute: str = ""
    remade: StagedRemat = NOTHING


def plan_group(
    search: Search,
    step: StagedStep,
    of: GroupProgram,
    mesh_axes: MeshAxes,
    pins: Pins,
    room: Room,
    finds: Finds,
    before: PlannedGroup | None = None,
    tries: int = MAX_TRIES,
) -> PlannedGroup:
    """Plan a group, with room for what micro-batches in flight leave.

    Args:
      search: how to plan.
      step: all tasks of all groups.
      of: the group's.
      mesh_axes: of its devices.
      pins: of what it meets others with, and the user's.
      room: that groups need.
      finds: what was found for other groups.
      before: the group planned otherwise, whose problem is solved again.
      tries: with less and less memory.
    Raises:
      Refused: it does not fit.
      PinError: an op cannot make what is pinned.
    """
    request = search.request
    budget = request.memory_budget_bytes
    group = of.tasks[0].group
    in_flight, ahead = room.in_flight[group], room.ahead_bytes[group]
    if before is not None and _is_known(before, pins, request.level):
        if before.peak_bytes(step, in_flight) + ahead <= budget:
            return before
    more, wide = 0, None
    for _ in range(tries):
        asked = replace(
            request,
            pins=pins[0],
            output_pins=pins[1],
            value_pins=pins[2],
            has_recipes=False,
            memory_budget_bytes=budget - more,
        )
        try:
            found = _found(search, of, mesh_axes, asked, finds, before)
            plan = found.plan()
        except InfeasiblePlanError as error:
            refused = _does_not_fit(error, group, in_flight, more)
            raise Refused(refused, is_alone=not more, wide=wide) from None
        is_bound = more > 0 or found.is_bound_by_memory
        planned = _planned(search, step, of, found, plan, is_bound)
        needed = planned.peak_bytes(step, in_flight) + ahead
        if needed <= budget:
            return replace(planned, wide=wide)
        wide = wide or planned
        more = needed - plan.predicted.peak_bytes
        if more >= budget:
            break
    fixed, left = planned.fixed_bytes(step), planned.left_bytes(step)
    left -= planned.offloaded_bytes(step)
    too_large = InfeasiblePlanError(
        f"stage {group} does not fit with what it holds between its tasks.",
        where=f"memory budget {format_bytes(int(budget))} per device",
        numbers=f"{format_bytes(needed)} needed: {format_bytes(fixed)} all the time,"
        f" {format_bytes(left)} for each of {in_flight} micro-batches in flight,"
        f" {format_bytes(ahead)} for what arrives early",
        fix=FIX,
    )
    raise Refused(too_large, is_alone=False, wide=wide)


def _found(
    search: Search,
    of: GroupProgram,
    mesh_axes: MeshAxes,
    asked: Request,
    finds: Finds,
    before: PlannedGroup | None,
) -> SearchResult:
    # Else pins are of what groups hand one another alone.
    by_user = search.request.pins or search.request.output_pins or asked.value_pins
    asked = replace(asked, names_pins=bool(by_user))
    if before is None:
        # The other groups' devices are not idle.
        own = search.target.replace(num_devices=math.prod(n for _, n in mesh_axes))
        return finds.find(of.program, mesh_axes, own, asked)
    if _pins_of(before.found.request) == _pins_of(asked):
        return search_again(before.found, asked)
    return search_held(before.found, asked)


def _pins_of(request: Request) -> Pins:
    return request.pins, request.output_pins, request.value_pins


def _is_known(before: PlannedGroup, pins: Pins, level: str) -> bool:
    """Whether a group was planned so before: what is pinned now was so then."""
    known, (inputs, outputs, inside) = before.found.request, pins
    specs, of = before.specs, before.of
    return (
        known.level in ("best", level)
        and known.value_pins == inside
        and known.pins.keys() <= inputs.keys()
        and known.output_pins.keys() <= outputs.keys()
        and all(specs[of.arguments[i]] == spec for i, spec in inputs.items())
        and all(specs[of.results[i]] == spec for i, spec in outputs.items())
    )


def _planned(
    search: Search,
    step: StagedStep,
    of: GroupProgram,
    found: SearchResult,
    plan: PlanData,
    is_bound: bool,
) -> PlannedGroup:
    """What was found for a group, with what its tasks take."""
    planned = PlannedGroup(
        of,
        found,
        plan,
        held_specs(of, plan.decisions),
        seconds_by_op(found),
        search.target.device.tile,
        is_bound=is_bound,
    )
    taken = working_bytes(step, of, found, lambda key: planned.bytes(step, key))
    return replace(planned, working=taken)


def _does_not_fit(
    error: InfeasiblePlanError,
    group: int,
    in_flight: int,
    more: int,
) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"stage {group} does not fit: {error.what}",
        where=error.where,
        numbers=f"{error.numbers}; {in_flight} micro-batches in flight hold"
        f" {format_bytes(more)} beside",
        fix=FIX,
    )
