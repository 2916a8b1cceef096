"""The shardings of each submesh, with equal layouts where stages exchange values,
planned until all submeshes fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.errors import InfeasiblePlanError, PinError
from rhino_jax.ir.spec import Spec, share_of, without
from rhino_jax.passes.staged.group import GroupProgram, group_program
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.passes.staged.stacks import End, Unstacked
from rhino_jax.passes.staged.step import StagedStep, ValueKey, ValueKind
from rhino_jax.plan.resolved_pins import ValuePin
from rhino_jax.plan.stages import Pipeline
from rhino_jax.planner.decision import MIN_GAIN
from rhino_jax.planner.search.driver import search_again
from rhino_jax.planner.search.found import costs_given, search_held
from rhino_jax.planner.search.records import Request
from rhino_jax.planner.staging.assembled import PlannedStages
from rhino_jax.planner.staging.planned import (
    FIX,
    MAX_TRIES,
    Pins,
    PlannedGroup,
    Refused,
    Room,
)
from rhino_jax.planner.staging.remat import StageRematSearch, StepOf
from rhino_jax.planner.staging.shapes import GroupMeshes, SubmeshSearches
from rhino_jax.planner.variant_search import Search
from rhino_jax.units import format_bytes


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


@dataclass(frozen=True, eq=False)
class GroupCrossing:
    """The values that one submesh sends and receives of every micro-batch.

    Attributes:
      step: the tasks of all submeshes.
      group: the submesh.
      known: values whose layout another submesh's plan, or a pin, prescribes.
      bytes_per_s: bandwidth of the link between submeshes, for one device.
      on_all: spec on a submesh → the part of it that is possible on all submeshes.
    """

    step: StagedStep
    group: int
    known: Collection[ValueKey]
    bytes_per_s: float
    on_all: Callable[[Spec], Spec]

    @cached_property
    def keys(self) -> list[ValueKey]:
        """The values whose layouts are free."""
        ends = {s.key for s in self.step.sends if self.group in (s.source, s.target)}
        free = (k for k in ends if k.kind is ValueKind.INSIDE and k not in self.known)
        return sorted(free)

    def seconds(self, group: PlannedGroup) -> float:
        """Return the predicted step of a submesh, and the seconds of its transfers."""
        sent = sum(
            self._link_s(group, key, group.specs[key])
            for key in self.keys
            if key in group.specs
        )
        return group.found.step_s + group.waits_s + sent

    def _link_s(self, group: PlannedGroup, key: ValueKey, spec: Spec) -> float:
        aval = self.step.types[key]
        size = aval.size * getattr(aval.dtype, "itemsize", 4)
        share = share_of(self.on_all(spec), tuple(aval.shape), group.sizes)
        return self.step.micro_batches * size * share / self.bytes_per_s

    def cheaper(self, group: PlannedGroup) -> dict[ValueKey, Spec]:
        """Return specs with which a submesh and the link take less time together.

        All other choices stay, so each spec is an improvement on its own.

        Returns:
          Value → spec; empty where it saves less than another search is worth
            (`MIN_GAIN`).
        """
        if not group.found.fits or not self.keys:
            return {}
        model, labels = group.found.best.model, group.found.best.labels
        # The submesh's exchanged arguments and results.
        ends = {NodeKind.INPUT: group.of.arguments, NodeKind.OUTPUT: group.of.results}
        nodes = {
            node.id: ends[node.kind][node.slot]
            for node in model.graph.nodes
            if node.kind in ends and ends[node.kind][node.slot] in self.keys
        }
        costs = costs_given(model.problem, labels, nodes)
        found: dict[ValueKey, Spec] = {}
        saved_s = 0.0
        for n, key in nodes.items():
            specs = [s.results[0] for s in model.options[n].strategies]
            total = costs[n] + np.array([self._link_s(group, key, s) for s in specs])
            # A spec that some submesh cannot have would be another one on the link.
            total[[self.on_all(s) != s for s in specs]] = np.inf
            best = int(total.argmin())
            if total[best] < total[labels[n]]:
                found[key] = specs[best]
                saved_s += float(total[labels[n]] - total[best])
        return found if saved_s > MIN_GAIN * group.found.step_s else {}


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupsSearch:
    """The search of all submeshes, with the same layout of exchanged values on both
    ends.

    Attributes:
      search: the search of the step.
      of_step: the step; the parts of a stack have the same layout.
      shapes: the submeshes.
      step_of: remat → the tasks of all submeshes.
      pipeline_of: planned submeshes → pipeline.
      finds: results of searches of submeshes of this step, in other tries too.
      held: fixed layouts of values, which override the user's pins.
      before: all submeshes as planned before: their problems are solved again, where
        pins differ.
      sides: passes of a micro-batch, where its values may be recomputed one by one;
        None: only whole chunks are.
    """

    search: Search
    of_step: Unstacked
    shapes: GroupMeshes
    step_of: StepOf
    pipeline_of: Callable[[PlannedStages], Pipeline]
    finds: SubmeshSearches = field(default_factory=SubmeshSearches)
    held: GroupLayouts = field(default_factory=GroupLayouts)
    before: Sequence[PlannedGroup] = ()
    sides: Callable[[], Sides] | None = None

    @cached_property
    def request(self) -> Request:
        """The options of the search, with the fixed layouts as pins."""
        request, held = self.search.request, self.held
        return replace(
            request,
            pins={**request.pins, **held.inputs},
            output_pins={**request.output_pins, **held.outputs},
        )

    def fit(self, room: Room) -> PlannedStages:
        """Plan all submeshes until they fit with inputs that arrive early.

        Args:
          room: the memory to set aside at first.
        Raises:
          InfeasiblePlanError: a submesh does not fit; says which.
          PinError: an op cannot produce a fixed layout.
        """
        limit_bytes = self.request.memory_budget_bytes
        for _ in range(MAX_TRIES):
            stages = self.plan(room)
            peaks, room = stages.simulation.group_peak_bytes, stages.room
            if max(peaks) <= limit_bytes:
                return stages
            ahead = [
                max(0, peak - group.peak_bytes(room.in_flight[group.group]))
                if peak > limit_bytes
                else room.ahead_bytes[group.group]
                for peak, group in zip(peaks, stages.groups, strict=True)
            ]
            room = replace(room, ahead_bytes=tuple(ahead))
        peak = max(peaks)
        raise InfeasiblePlanError(
            f"stage {peaks.index(peak)} does not fit with what reaches it early.",
            where=f"memory budget {format_bytes(int(limit_bytes))} per device",
            numbers=f"{format_bytes(peak)} at its peak by {stages.pipeline.schedule}",
            fix=FIX,
        )

    def plan(self, room: Room) -> PlannedStages:
        """Plan all submeshes with some memory set aside.

        Raises:
          InfeasiblePlanError, PinError: see `fit`.
        """
        known: dict[ValueKey, Spec] = {}
        stacks: dict[int, Spec] = {}
        found: dict[int, PlannedGroup] = {}
        of_step, shapes = self.of_step, self.shapes
        # The values to recompute are chosen again.
        remat = replace(room.remat, values={}) if room.may_recompute else room.remat
        step = self.step_of(remat)
        # Sent value → the submeshes that have it.
        meeting: dict[ValueKey, set[int]] = defaultdict(set)
        for send in step.sends:
            meeting[send.key] |= {send.source, send.target}

        def on_all(spec: Spec, groups: Iterable[int] = range(step.groups)) -> Spec:
            """Return the part of a spec that submeshes of unequal size have."""
            sizes = {shapes.places[g] for g in groups}
            return spec if len(sizes) == 1 else without(spec, [shapes.stage_axis])

        known |= {k: on_all(s, meeting[k]) for k, s in self.held.handed.items()}

        def planned(step: StagedStep, group: int, tries: int) -> PlannedGroup:
            old = self.before[group] if self.before else None
            of = old.of if old else group_program(step, group, of_step.program)

            def with_specs(
                specs: Mapping[ValueKey, Spec], old: PlannedGroup | None
            ) -> PlannedGroup:
                laid = {**known, **specs}
                every = self._pins(step, of, laid, stacks)
                return self._plan_group(step, of, every, room, old, tries)

            link = GroupCrossing(step, group, known, shapes.hop[0], on_all)
            # By the time of its own devices; or with other specs of exchanged values,
            # where that is faster.
            one = with_specs({}, old)
            with suppress(Refused, PinError):
                if specs := link.cheaper(one):
                    return min(one, with_specs(specs, one), key=link.seconds)
            return one

        remat_search = StageRematSearch(
            self.step_of,
            self.sides,
            planned,
            room,
            self.request.memory_budget_bytes,
            self.finds,
        )
        # Layouts of a small submesh are possible on a larger one: its other axes are
        # the same.
        for group in sorted(range(step.groups), key=shapes.places.__getitem__):
            one, remat = remat_search.of(step, group, remat)
            found[group], step = one, one.step
            for key in one.of.arguments:
                if key.kind is ValueKind.INPUT:
                    end = of_step.inputs[key.number]
                    if end.part is not None:
                        spec = without(one.specs[key], [shapes.stage_axis])
                        stacks.setdefault(end.whole, spec)
            for key in one.specs.keys() & meeting.keys():
                known.setdefault(key, on_all(one.specs[key], meeting[key]))
        # Tasks and plans of earlier tries are large, and not needed any more.
        groups = tuple(
            replace(found[g], step=step, wide=None) for g in range(step.groups)
        )
        room = replace(room, remat=remat)
        stages = PlannedStages(of_step, shapes, step, groups, room)
        return replace(stages, pipeline=self.pipeline_of(stages))

    def _pins(
        self,
        step: StagedStep,
        of: GroupProgram,
        laid: Mapping[ValueKey, Spec],
        stacks: Mapping[int, Spec],
    ) -> Pins:
        """Return the pins of a submesh's arguments and results, by position: the
        layouts that other submeshes or the user prescribe; and of its values.

        Args:
          step: the tasks of all submeshes.
          of: the submesh's tasks as one program.
          laid: layouts of values that submeshes send or receive.
          stacks: layouts of the parts of stacks on other submeshes.
        """
        # Each part of a stack is sharded by layers over the several places of a
        # submesh: so a stack as a whole is one array over all submeshes.
        group, axis = of.tasks[0].group, self.shapes.stage_axis
        is_large = self.shapes.places[group] > 1

        def own(spec: Spec, end: End) -> Spec:
            """Return a spec on all devices as one on the submesh."""
            if is_large and end.part is None:
                return spec
            spec = without(spec, [axis])
            return ((axis, *spec[0]), *spec[1:]) if is_large else spec

        asked, of_step = self.request, self.of_step
        inputs: dict[int, Spec] = {}
        for i, key in enumerate(of.arguments):
            if key in laid:
                inputs[i] = laid[key]
            elif key.kind is ValueKind.INPUT:
                end = of_step.inputs[key.number]
                if (spec := {**asked.pins, **stacks}.get(end.whole)) is not None:
                    inputs[i] = own(spec, end)
        results = {
            made[1]: own(asked.output_pins[end.whole], end)
            for made, end in zip(step.outputs, of_step.outputs, strict=True)
            if isinstance(made, tuple) and end.whole in asked.output_pins
        }
        results |= laid
        outputs = {i: results[k] for i, k in enumerate(of.results) if k in results}
        return inputs, outputs, self.held.values.get(group, {})

    def _plan_group(
        self,
        step: StagedStep,
        of: GroupProgram,
        pins: Pins,
        room: Room,
        before: PlannedGroup | None,
        tries: int,
    ) -> PlannedGroup:
        """Plan a submesh, with room for the residuals of micro-batches in flight.

        Args:
          step: the tasks of all submeshes.
          of: the submesh's tasks as one program.
          pins: layouts of the values that it exchanges with others, and the user's
            pins.
          room: the memory to set aside.
          before: the submesh as planned before, whose problem is solved again; None:
            none.
          tries: maximum number of tries, each with less memory.
        Raises:
          Refused: it does not fit.
          PinError: an op cannot produce what is pinned.
        """
        request, group = self.request, of.tasks[0].group
        budget = request.memory_budget_bytes
        in_flight, ahead = room.in_flight[group], room.ahead_bytes[group]
        if before is not None and before.has(pins, request.level):
            if before.peak_bytes(in_flight) + ahead <= budget:
                return before
        # Otherwise all pins are of values that stages send each other.
        by_user = request.pins or request.output_pins or pins[2]
        more, wide = 0, None
        for _ in range(tries):
            asked = replace(
                request,
                pins=pins[0],
                output_pins=pins[1],
                value_pins=pins[2],
                has_recipes=False,
                memory_budget_bytes=budget - more,
                names_pins=bool(by_user),
            )
            try:
                if before is None:
                    # Without this, the plan would note the other submeshes' devices as
                    # idle.
                    devices = self.shapes.devices(group)
                    own = self.search.target.replace(num_devices=devices)
                    axes = self.shapes.mesh(group)
                    found = self.finds.find(of.program, axes, own, asked)
                else:
                    known = before.found.request
                    same = (known.pins, known.output_pins, known.value_pins) == pins
                    found = (search_again if same else search_held)(before.found, asked)
                plan = found.plan()
            except InfeasiblePlanError as error:
                refused = InfeasiblePlanError(
                    f"stage {group} does not fit: {error.what}",
                    where=error.where,
                    numbers=f"{error.numbers}; {in_flight} micro-batches in flight hold"
                    f" {format_bytes(more)} beside",
                    fix=FIX,
                )
                raise Refused(refused, is_alone=not more, wide=wide) from None
            is_bound = more > 0 or found.is_bound_by_memory
            planned = PlannedGroup(step, of, found, plan, is_bound=is_bound)
            planned = replace(planned, working=planned.taken_bytes())
            needed = planned.peak_bytes(in_flight) + ahead
            if needed <= budget:
                return replace(planned, wide=wide)
            wide = wide or planned
            more = needed - plan.predicted.peak_bytes
            if more >= budget:
                break
        fixed, left = planned.fixed_bytes, planned.left_bytes
        left -= planned.offloaded_bytes()
        too_large = InfeasiblePlanError(
            f"stage {group} does not fit with the residuals between its tasks.",
            where=f"memory budget {format_bytes(int(budget))} per device",
            numbers=f"{format_bytes(needed)} needed: {format_bytes(fixed)} all the"
            f" time, {format_bytes(left)} for each of {in_flight} micro-batches in"
            f" flight, {format_bytes(ahead)} for what arrives early",
            fix=FIX,
        )
        raise Refused(too_large, is_alone=False, wide=wide)
