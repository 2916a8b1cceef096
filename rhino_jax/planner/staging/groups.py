"""The shardings of each submesh, with equal layouts where stages exchange values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.ir.spec import Spec, without
from rhino_jax.passes.staged.group import GroupProgram, group_program
from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.passes.staged.stacks import End, Unstacked
from rhino_jax.passes.staged.step import StagedStep, ValueKey, ValueKind
from rhino_jax.plan.resolved_pins import ValuePin
from rhino_jax.planner.search.records import Request
from rhino_jax.planner.staging.planned import (
    MAX_TRIES,
    PlannedGroup,
    Refused,
    Room,
    plan_group,
)
from rhino_jax.planner.staging.remat import StageRematSearch, StepOf, in_vain
from rhino_jax.planner.staging.shapes import GroupMeshes, SubmeshSearches
from rhino_jax.planner.staging.transfers import GroupCrossing
from rhino_jax.planner.variant_search import Search


@dataclass(frozen=True, slots=True)
class GroupLayouts:
    """Layouts to which values are fixed when submeshes are planned again.

    Attributes:
      inputs, outputs: position in the step as the user wrote it → layout.
      handed: key of a value that stages send and receive → layout.
      values: submesh → value id in its program → pin.
    """

    inputs: Mapping[int, Spec] = field(default_factory=dict)
    outputs: Mapping[int, Spec] = field(default_factory=dict)
    handed: Mapping[ValueKey, Spec] = field(default_factory=dict)
    values: Mapping[int, Mapping[int, ValuePin]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Cache key, equal for equal layouts."""
        return repr((self.inputs, self.outputs, self.handed, self.values))


NOTHING = GroupLayouts()
"""No fixed layouts in addition to the user's pins."""


def plan_groups(
    search: Search,
    step_of: StepOf,
    of_step: Unstacked,
    shapes: GroupMeshes,
    room: Room,
    finds: SubmeshSearches,
    held: GroupLayouts = NOTHING,
    before: Sequence[PlannedGroup] = (),
    sides: Callable[[], Sides] | None = None,
) -> tuple[StagedStep, list[PlannedGroup], StagedRemat]:
    """Plan all submeshes, with the same layout of exchanged values on both ends.

    Args:
      search: the search of the step.
      step_of: remat → the tasks of all submeshes.
      of_step: the step; the parts of a stack have the same layout.
      shapes: the submeshes.
      room: the memory to set aside.
      finds: results of searches of submeshes of this step, in other tries too.
      held: fixed layouts of values, which override the user's pins.
      before: all submeshes as planned before: their problems are solved again, where
        pins differ.
      sides: passes of a micro-batch, where its values may be recomputed one by one;
        None: only whole chunks are.
    Returns:
      The tasks; the planned submeshes; their remat.
    Raises:
      InfeasiblePlanError: a submesh does not fit; says which.
      PinError: an op cannot produce a fixed layout.
    """
    known: dict[ValueKey, Spec] = {}
    stacks: dict[int, Spec] = {}
    found: dict[int, PlannedGroup] = {}
    search = search.asking(
        pins={**search.request.pins, **held.inputs},
        output_pins={**search.request.output_pins, **held.outputs},
    )
    request, budget = search.request, search.request.memory_budget_bytes
    # The values to recompute are chosen again.
    remat = replace(room.remat, values={}) if room.may_recompute else room.remat
    step = step_of(remat)
    meeting = _meeting(step)
    known |= {k: _on_all(s, meeting[k], shapes) for k, s in held.handed.items()}

    def planned(step: StagedStep, group: int, tries: int) -> PlannedGroup:
        old = before[group] if before else None
        of = old.of if old else group_program(step, group, of_step.program)

        def with_specs(
            specs: Mapping[ValueKey, Spec], old: PlannedGroup | None
        ) -> PlannedGroup:
            laid = {**known, **specs}
            pins = _pins(of_step, shapes, request, laid, stacks, of, step.outputs)
            every = *pins, held.values.get(group, {})
            mesh = shapes.mesh(group)
            return plan_group(search, step, of, mesh, every, room, finds, old, tries)

        link = GroupCrossing.of(step, group, known, shapes.hop[0], on_all)
        return link.planned(with_specs({}, old), with_specs)

    on_all = partial(_on_all, groups=range(step.groups), shapes=shapes)
    remat_search = StageRematSearch(step_of, sides, planned, room, budget, finds)
    # Layouts of a small submesh are possible on a larger one: its other axes are the
    # same.
    for group in sorted(range(step.groups), key=lambda g: shapes.places[g]):
        step, one, remat = _that_fits(remat_search, step, group, remat)
        found[group] = one
        for whole, spec in _of_stacks(one, of_step):
            stacks.setdefault(whole, without(spec, [shapes.stage_axis]))
        for key in one.specs.keys() & meeting.keys():
            known.setdefault(key, _on_all(one.specs[key], meeting[key], shapes))
    return step, [found[group] for group in range(step.groups)], remat


def _that_fits(
    remat_search: StageRematSearch, step: StagedStep, group: int, remat: StagedRemat
) -> tuple[StagedStep, PlannedGroup, StagedRemat]:
    """Plan a submesh so that it fits, as it is or with rematerialization.

    Returns:
      The tasks; the planned submesh; the remat of all submeshes.
    Raises:
      InfeasiblePlanError: it does not fit either way.
    """
    room = remat_search.room
    is_again = {c for c, g in enumerate(step.chunks) if g == group} <= remat.chunks
    is_chosen = room.may_recompute and not is_again
    may_recompute = is_chosen and not room.is_split
    kept = None
    try:
        wide = (kept := remat_search.planned(step, group, MAX_TRIES)).wide
    except Refused as refused:
        if refused.is_alone or not may_recompute:
            # Remat does not lower the peak of one micro-batch alone.
            raise _told(refused, room, is_again=is_again) from None
        wide = refused.wide
    if kept is None or (may_recompute and kept.is_bound):
        step, one, remat = remat_search.of(step, group, remat, kept, wide)
        if one is not kept:
            return step, one, remat
        kept = one
    if is_chosen:
        return remat_search.by_price(step, group, remat, kept)
    return step, kept, remat


def _of_stacks(group: PlannedGroup, of_step: Unstacked) -> Iterator[tuple[int, Spec]]:
    """Yield the stacks of which a submesh has a part, and the layout of that part."""
    for key in group.of.arguments:
        if key.kind is ValueKind.INPUT and of_step.inputs[key.number].part is not None:
            yield of_step.inputs[key.number].whole, group.specs[key]


def _on_all(spec: Spec, groups: Collection[int], shapes: GroupMeshes) -> Spec:
    """Return the part of a spec that submeshes of unequal size have in common."""
    sizes = {shapes.places[g] for g in groups}
    return spec if len(sizes) == 1 else without(spec, [shapes.stage_axis])


def _told(refused: Refused, room: Room, *, is_again: bool) -> InfeasiblePlanError:
    """Return the error where a submesh does not fit, with further fixes."""
    error = refused.error
    if is_again:
        return in_vain(error)
    may_recompute = room.may_recompute and not room.is_split
    if refused.is_alone or may_recompute or not room.would_recompute:
        return error
    return InfeasiblePlanError(
        error.what,
        where=error.where,
        numbers=error.numbers,
        fix=f"{error.fix.rstrip('.')}, or {room.would_recompute}: stages then run their"
        " forward passes again where that makes them fit.",
    )


def _meeting(step: StagedStep) -> dict[ValueKey, set[int]]:
    """Return sent value → the submeshes that have it."""
    found: dict[ValueKey, set[int]] = {}
    for send in step.sends:
        found.setdefault(send.key, set()).update((send.source, send.target))
    return found


def _pins(
    of_step: Unstacked,
    shapes: GroupMeshes,
    request: Request,
    known: Mapping[ValueKey, Spec],
    stacks: Mapping[int, Spec],
    of: GroupProgram,
    outputs: Sequence[Any],
) -> tuple[dict[int, Spec], dict[int, Spec]]:
    """Return the pins of a submesh's arguments and results, by position: the layouts
    that other submeshes or the user prescribe.

    Args:
      of_step: the step.
      shapes: the submeshes.
      request: has the user's pins of the step's inputs and results.
      known: layouts of values that other submeshes send or receive.
      stacks: layouts of other submeshes' parts of stacks, other than that.
      of: the submesh's tasks as one program.
      outputs: submesh and key of each result of the step.
    """
    stage_axis = shapes.stage_axis
    # Each part of a stack is sharded by layers over the several places of a submesh: so
    # a stack as a whole is one array over all submeshes.
    is_large = shapes.places[of.tasks[0].group] > 1

    def own(spec: Spec, end: End) -> Spec:
        """Return a spec on all devices as one on the submesh."""
        if is_large and end.part is None:
            return spec
        spec = without(spec, [stage_axis])
        return ((stage_axis, *spec[0]), *spec[1:]) if is_large else spec

    inputs: dict[int, Spec] = {}
    for i, key in enumerate(of.arguments):
        end = of_step.inputs[key.number] if key.kind is ValueKind.INPUT else None
        if key in known:
            inputs[i] = known[key]
        elif end is not None and end.part is not None and end.whole in stacks:
            inputs[i] = own(stacks[end.whole], end)
        elif end is not None and end.whole in request.pins:
            inputs[i] = own(request.pins[end.whole], end)
    asked = request.output_pins
    results = {
        made[1]: own(asked[end.whole], end)
        for made, end in zip(outputs, of_step.outputs, strict=True)
        if isinstance(made, tuple) and end.whole in asked
    }
    results |= known
    return inputs, {i: results[k] for i, k in enumerate(of.results) if k in results}
