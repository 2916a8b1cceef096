"""The shardings of each submesh, with equal layouts where stages exchange values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rhino_jax.errors import PinError
from rhino_jax.ir.spec import Spec, without
from rhino_jax.passes.staged.group import GroupProgram, group_program
from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.passes.staged.stacks import End, Unstacked
from rhino_jax.passes.staged.step import StagedStep, ValueKey, ValueKind
from rhino_jax.plan.resolved_pins import ValuePin
from rhino_jax.planner.staging.planned import (
    PlannedGroup,
    Refused,
    Room,
    plan_group,
)
from rhino_jax.planner.staging.remat import StageRematSearch, StepOf
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
    # Sent value → the submeshes that have it.
    meeting: dict[ValueKey, set[int]] = defaultdict(set)
    for send in step.sends:
        meeting[send.key] |= {send.source, send.target}

    def on_all(spec: Spec, groups: Iterable[int] = range(step.groups)) -> Spec:
        """Return the part of a spec that submeshes of unequal size have in common."""
        sizes = {shapes.places[g] for g in groups}
        return spec if len(sizes) == 1 else without(spec, [shapes.stage_axis])

    def pins_of(
        step: StagedStep, of: GroupProgram, laid: Mapping[ValueKey, Spec]
    ) -> tuple[dict[int, Spec], dict[int, Spec]]:
        """Return the pins of a submesh's arguments and results, by position: the
        layouts that other submeshes or the user prescribe.

        Args:
          step: the tasks of all submeshes.
          of: the submesh's tasks as one program.
          laid: layouts of values that submeshes send or receive.
        """
        # Each part of a stack is sharded by layers over the several places of a
        # submesh: so a stack as a whole is one array over all submeshes.
        is_large = shapes.places[of.tasks[0].group] > 1

        def own(spec: Spec, end: End) -> Spec:
            """Return a spec on all devices as one on the submesh."""
            if is_large and end.part is None:
                return spec
            spec = without(spec, [shapes.stage_axis])
            return ((shapes.stage_axis, *spec[0]), *spec[1:]) if is_large else spec

        inputs: dict[int, Spec] = {}
        for i, key in enumerate(of.arguments):
            end = of_step.inputs[key.number] if key.kind is ValueKind.INPUT else None
            if key in laid:
                inputs[i] = laid[key]
            elif end is not None and end.part is not None and end.whole in stacks:
                inputs[i] = own(stacks[end.whole], end)
            elif end is not None and end.whole in request.pins:
                inputs[i] = own(request.pins[end.whole], end)
        asked = request.output_pins
        results = {
            made[1]: own(asked[end.whole], end)
            for made, end in zip(step.outputs, of_step.outputs, strict=True)
            if isinstance(made, tuple) and end.whole in asked
        }
        results |= laid
        return inputs, {i: results[k] for i, k in enumerate(of.results) if k in results}

    known |= {k: on_all(s, meeting[k]) for k, s in held.handed.items()}

    def planned(step: StagedStep, group: int, tries: int) -> PlannedGroup:
        old = before[group] if before else None
        of = old.of if old else group_program(step, group, of_step.program)

        def with_specs(
            specs: Mapping[ValueKey, Spec], old: PlannedGroup | None
        ) -> PlannedGroup:
            laid = {**known, **specs}
            every = *pins_of(step, of, laid), held.values.get(group, {})
            mesh = shapes.mesh(group)
            return plan_group(search, step, of, mesh, every, room, finds, old, tries)

        link = GroupCrossing(step, group, known, shapes.hop[0], on_all)
        # By the time of its own devices; or with other specs of exchanged values, where
        # that is faster.
        one = with_specs({}, old)
        with suppress(Refused, PinError):
            if specs := link.cheaper(one):
                return min(one, with_specs(specs, one), key=link.seconds)
        return one

    remat_search = StageRematSearch(step_of, sides, planned, room, budget, finds)
    # Layouts of a small submesh are possible on a larger one: its other axes are the
    # same.
    for group in sorted(range(step.groups), key=lambda g: shapes.places[g]):
        step, one, remat = remat_search.of(step, group, remat)
        found[group] = one
        for key in one.of.arguments:
            end = of_step.inputs[key.number] if key.kind is ValueKind.INPUT else None
            if end is not None and end.part is not None:
                spec = without(one.specs[key], [shapes.stage_axis])
                stacks.setdefault(end.whole, spec)
        for key in one.specs.keys() & meeting.keys():
            known.setdefault(key, on_all(one.specs[key], meeting[key]))
    return step, [found[group] for group in range(step.groups)], remat
