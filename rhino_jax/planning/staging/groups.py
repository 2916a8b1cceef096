"""Each group's shardings: planned on its own devices, alike where groups meet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rhino_jax.apply.tasks.held import held_bytes, held_specs
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.ir.spec import Spec, without
from rhino_jax.plan.plan import Plan
from rhino_jax.planning.meshes import MeshAxes
from rhino_jax.planning.search import Search
from rhino_jax.planning.staging.priced import seconds_by_op
from rhino_jax.planning.staging.shapes import Shapes
from rhino_jax.planning.staging.working import working_bytes
from rhino_jax.search.driver import find
from rhino_jax.search.found import Found
from rhino_jax.search.records import Request
from rhino_jax.transform.staged.group import GroupProgram, group_program
from rhino_jax.transform.staged.holding import FIXED, Holding, is_once
from rhino_jax.transform.staged.stacks import End, Unstacked
from rhino_jax.transform.staged.step import Key, Kind, Step
from rhino_jax.units import format_bytes


Pins = tuple[dict[int, Spec], dict[int, Spec]]
"""Of arguments and of results, by position."""


@dataclass(frozen=True, eq=False)
class PlannedGroup:
    """One group.

    Attributes:
      of: its tasks as one program.
      plan: of that.
      specs: of everything that it has between tasks.
      seconds: predicted, of every op.
      tile: of its devices' memory.
      working: of every task, the bytes that it takes beyond what is held anyway.
    """

    of: GroupProgram
    plan: Plan
    specs: Mapping[Key, Spec]
    seconds: Mapping[int, float]
    tile: tuple[int, ...] = ()
    working: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.plan.mesh_axes)

    def bytes(self, step: Step, key: Key) -> int:
        """Of one device."""
        return held_bytes(step.types[key], self.specs[key], self.sizes, self.tile)

    def left_bytes(self, step: Step) -> int:
        """What the forward pass of a micro-batch leaves for its backward pass."""
        return sum(self.held(step, chunk)[0] for chunk in self.chunks)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Of the model, those that it runs."""
        of = {t.place: None for t in self.of.tasks if t.is_per_micro_batch}
        return tuple(sorted(of))

    def held(self, step: Step, chunk: int) -> tuple[int, int, int]:
        """Bytes of what a chunk's tasks leave for one another, of a micro-batch: see
        `Holding.of_chunk`."""
        left, kept, handed = Holding.of(self.of.tasks).of_chunk(chunk)
        sizes = [sum(self.bytes(step, k) for k in ks) for ks in (left, kept, handed)]
        return sizes[0], sizes[1], sizes[2]

    def fixed_bytes(self, step: Step) -> int:
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

    def peak_bytes(self, step: Step, in_flight: int) -> int:
        """The most that it holds, but for what arrives ahead of its time.

        Args:
          in_flight: micro-batches of which its forward passes have left something.
        """
        working = max(self.working_bytes(chunk) for chunk in self.chunks)
        flying = in_flight * self.left_bytes(step) + working
        return self.fixed_bytes(step) + max(flying, self.update_bytes)


def plan_groups(
    search: Search,
    step: Step,
    of_step: Unstacked,
    shapes: Shapes,
    in_flight: tuple[int, ...],
    ahead: Sequence[int],
) -> list[PlannedGroup]:
    """Plan all groups; what one sends another is laid out alike on both.

    Args:
      search: how to plan.
      step: all tasks.
      of_step: the step; parts of a stack are laid out alike.
      shapes: of the groups.
      in_flight: of every group, the micro-batches of which it holds something.
      ahead: of every group, bytes of a device that what arrives early takes.
    Raises:
      InfeasiblePlanError: a group does not fit; says which.
    """
    known: dict[Key, Spec] = {}
    stacks: dict[int, Spec] = {}
    found: dict[int, PlannedGroup] = {}
    request, at = search.request, shapes.stage_axis
    meeting = _meeting(step)
    # What a small group has, a larger one can have too: its other axes are the same.
    for group in sorted(range(step.groups), key=lambda g: shapes.places[g]):
        of = group_program(step, group, of_step.program)
        laid = _Laid(of_step, at, shapes.places[group] > 1, request, known, stacks)
        pins = laid.pins(of, step.outputs)
        mesh = shapes.mesh(group)
        one = _planned(
            search, step, of, mesh, pins, group, in_flight[group], ahead[group]
        )
        found[group] = one
        for key in of.arguments:
            if key.kind is Kind.INPUT and of_step.inputs[key.number].part is not None:
                whole = of_step.inputs[key.number].whole
                stacks.setdefault(whole, without(one.specs[key], [at]))
        for key in one.specs.keys() & meeting.keys():
            sizes = {shapes.places[g] for g in meeting[key]}
            spec = one.specs[key]
            known.setdefault(key, spec if len(sizes) == 1 else without(spec, [at]))
    return [found[group] for group in range(step.groups)]


def _meeting(step: Step) -> dict[Key, set[int]]:
    """Of everything that is sent, the groups that have it."""
    found: dict[Key, set[int]] = {}
    for send in step.sends:
        found.setdefault(send.key, set()).update((send.source, send.target))
    return found


@dataclass(frozen=True, eq=False)
class _Laid:
    """What a group lays out as elsewhere, or as the user asks.

    Attributes:
      of_step: the step.
      stage_axis: of the mesh.
      is_large: the group has several devices along it, among which each part of a stack
        is cut by layers: so a stack as a whole is one array over all groups.
      request: with the user's pins of the step's inputs and results.
      known: of what other groups send or get.
      stacks: of other groups' parts, beside that.
    """

    of_step: Unstacked
    stage_axis: int
    is_large: bool
    request: Request
    known: Mapping[Key, Spec]
    stacks: Mapping[int, Spec]

    def pins(self, of: GroupProgram, outputs: Sequence[Any]) -> Pins:
        """
        Args:
          outputs: of every result of the step its group and key.
        """
        inputs: dict[int, Spec] = {}
        for i, key in enumerate(of.arguments):
            end = self.of_step.inputs[key.number] if key.kind is Kind.INPUT else None
            if key in self.known:
                inputs[i] = self.known[key]
            elif end is not None and end.part is not None and end.whole in self.stacks:
                inputs[i] = self._own(self.stacks[end.whole], end)
            elif end is not None and end.whole in self.request.pins:
                inputs[i] = self._own(self.request.pins[end.whole], end)
        asked = self.request.output_pins
        results = {
            made[1]: self._own(asked[end.whole], end)
            for made, end in zip(outputs, self.of_step.outputs, strict=True)
            if isinstance(made, tuple) and end.whole in asked
        }
        results |= self.known
        return inputs, {i: results[k] for i, k in enumerate(of.results) if k in results}

    def _own(self, spec: Spec, end: End) -> Spec:
        """As of all devices, on the group's own."""
        if not self.is_large:
            return without(spec, [self.stage_axis])
        if end.part is None:
            return spec
        first, *rest = without(spec, [self.stage_axis])
        return (self.stage_axis, *first), *rest


def _planned(
    search: Search,
    step: Step,
    of: GroupProgram,
    mesh_axes: MeshAxes,
    pins: Pins,
    group: int,
    in_flight: int,
    ahead: int,
) -> PlannedGroup:
    """A group, with room for what micro-batches in flight leave."""
    request = search.request
    budget = request.memory_budget_bytes - ahead
    # The other groups' devices are not idle.
    own = search.target.replace(num_devices=math.prod(n for _, n in mesh_axes))
    more = 0
    for _ in range(3):
        asked = replace(
            request,
            pins=pins[0],
            output_pins=pins[1],
            value_pins={},
            has_recipes=False,
            memory_budget_bytes=budget - more,
        )
        try:
            found = find(of.program, [mesh_axes], own, asked)
            plan = found.plan()
        except InfeasiblePlanError as error:
            raise _does_not_fit(error, group, in_flight, more) from None
        planned = _with_working(
            PlannedGroup(
                of,
                plan,
                held_specs(of, plan.decisions),
                seconds_by_op(found),
                search.target.device.tile,
            ),
            step,
            found,
        )
        needed = planned.peak_bytes(step, in_flight)
        if needed <= budget:
            return planned
        more = needed - plan.predicted.peak_bytes
    fixed, left = planned.fixed_bytes(step), planned.left_bytes(step)
    raise InfeasiblePlanError(
        f"stage {group} does not fit with what it holds between its tasks.",
        where=f"memory budget {format_bytes(int(budget + ahead))} per device",
        numbers=f"{format_bytes(needed + ahead)} needed: {format_bytes(fixed)} all the"
        f" time, {format_bytes(left)} for each of {in_flight} micro-batches in flight,"
        f" {format_bytes(ahead)} for what arrives early",
        fix=_FIX,
    )


def _with_working(planned: PlannedGroup, step: Step, found: Found) -> PlannedGroup:
    taken = working_bytes(step, planned.of, found, lambda key: planned.bytes(step, key))
    return replace(planned, working=taken)


_FIX = "take more micro-batches, more stages or more devices."


def _does_not_fit(
    error: InfeasiblePlanError, group: int, in_flight: int, more: int
) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"stage {group} does not fit: {error.what}",
        where=error.where,
        numbers=f"{error.numbers}; {in_flight} micro-batches in flight hold"
        f" {format_bytes(more)} beside",
        fix=_FIX,
    )
