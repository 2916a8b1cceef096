"""Planned submeshes: the costs of their tasks and transfers, and one plan of all.

A submesh that is planned on its own receives a value replicated at no cost, though
every one of its devices then gets all of it over the link between submeshes: a link
that is often a tenth as fast as those inside of a submesh, over which shards can be
gathered.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rhino_jax.errors import StageError
from rhino_jax.ir.spec import replicated, share_of, without
from rhino_jax.passes.staged.stacks import End, Unstacked
from rhino_jax.passes.staged.step import StagedStep, TaskKind, ValueKey, ValueKind
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.lines import scaled, summed
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.records import LineTime, Predicted, Timeline
from rhino_jax.plan.stages import (
    Between,
    Pipeline,
    StageCost,
    StageHop,
    StagePlan,
    StageSend,
)
from rhino_jax.planner.meshes import stage_devices
from rhino_jax.planner.search.read_back.assemble import pins_text
from rhino_jax.planner.staging.planned import PlannedGroup, Room
from rhino_jax.planner.staging.shapes import GroupMeshes
from rhino_jax.planner.variant_search import Search


UNKNOWN = Pipeline(micro_batches=1, schedule="", runs=(), costs=(), hops=())
"""The pipeline of submeshes whose costs are not known yet."""


@dataclass(frozen=True, eq=False)
class PlannedStages:
    """All submeshes, planned, and their pipeline.

    Attributes:
      of_step: the step, with layer stacks split.
      shapes: the submeshes.
      step: their tasks.
      groups: their plans.
      room: the memory set aside for residuals and inputs that arrive early, and what
        the submeshes recompute.
      pipeline: their pipeline.
    """

    of_step: Unstacked
    shapes: GroupMeshes
    step: StagedStep
    groups: tuple[PlannedGroup, ...]
    room: Room
    pipeline: Pipeline = UNKNOWN

    @cached_property
    def simulation(self) -> Simulation:
        """The pipeline's simulated schedule."""
        return simulate(schedule_of(self.pipeline))

    def with_costs(self, pipeline: Pipeline) -> Pipeline:
        """Return a pipeline with the costs of its tasks and transfers."""
        costs = tuple(map(self._cost, range(len(self.step.chunks))))
        return replace(
            pipeline, costs=costs, hops=self._hops(), between=self._between()
        )

    def _cost(self, chunk: int) -> StageCost:
        chunks = self.step.chunks
        group = self.groups[chunks[chunk]]
        is_first = chunks.index(group.group) == chunk
        parts = dict.fromkeys(TaskKind, 0.0)
        for task, seconds in group.timed:
            if task.place == chunk if task.is_per_micro_batch else is_first:
                parts[task.kind] += seconds
        times = self.step.micro_batches
        left, kept, handed = group.held(chunk)
        return StageCost(
            forward_s=parts[TaskKind.FORWARD] / times,
            backward_s=parts[TaskKind.BACKWARD] / times,
            update_s=parts[TaskKind.START] + parts[TaskKind.UPDATE],
            activation_bytes=left,
            fixed_bytes=group.fixed_bytes if is_first else 0,
            working_bytes=group.working_bytes(chunk),
            update_bytes=group.working_bytes(None) if is_first else 0,
            weights_s=parts[TaskKind.WEIGHT_GRADIENT] / times,
            weight_residual_bytes=kept,
            output_gradient_bytes=handed,
            offloaded_bytes=group.offloaded_bytes(chunk),
        )

    def _bytes(self, source: int, target: int, key: ValueKey) -> int:
        """Return the bytes per device of a value that one submesh sends to another: in
        the target's layout, sharded over the mesh axes of equal size. Sent to more
        devices, they count in proportion."""
        ends = [self.groups[end].sizes for end in (source, target)]
        unlike = [axis for axis, (m, n) in enumerate(zip(*ends, strict=True)) if m != n]
        aval = self.step.types[key]
        spec = without(self.groups[target].specs[key], unlike)
        share = share_of(spec, tuple(aval.shape), ends[1])
        times = max(1.0, math.prod(ends[1]) / math.prod(ends[0]))
        return math.ceil(aval.size * getattr(aval.dtype, "itemsize", 4) * share * times)

    def _between(self) -> tuple[Between, ...]:
        """Return the tasks of every submesh between forward and backward passes; empty
        where there are none."""
        seconds = [
            [s for task, s in group.timed if task.kind is TaskKind.BETWEEN]
            for group in self.groups
        ]
        if not any(seconds):
            return ()
        receives = [Counter[int]() for _ in self.groups]
        for send in self.step.met:
            size = self._bytes(send.source, send.target, send.key)
            receives[send.target][send.source] += size
        return tuple(
            Between(sum(own, 0.0), tuple(sorted(of.items())))
            for own, of in zip(seconds, receives, strict=True)
        )

    def _hops(self) -> tuple[StageHop, ...]:
        """Return the chunks between which anything is sent, and bytes per micro-batch.

        Sums over all micro-batches, and values that updates exchange, are sent once a
        step and count no bytes. A value that several chunks of a submesh read is sent
        to the first of them, after which the others run; within a submesh nothing is
        sent.
        """
        chunks = self.step.chunks
        sizes: dict[tuple[int, int], list[int]] = {}  # forward, backward
        readers: dict[tuple[ValueKey, int], int] = {}
        tasks = [t for mine in self.step.tasks for t in mine if t.is_per_micro_batch]
        made = {
            k: t.place for t in tasks for k in t.makes if k.kind is ValueKind.INSIDE
        }
        for task in tasks:
            for key in task.reads:
                source, place = made.get(key, task.place), task.place
                if source == place:
                    continue
                into = sizes.setdefault(_pair(source, place), [0, 0])
                if chunks[source] == task.group:
                    continue
                first = readers.get((key, task.group))
                if first is None:
                    readers[key, task.group] = place
                    into[source > place] += self._bytes(chunks[source], task.group, key)
                elif first != place:
                    sizes.setdefault(_pair(first, place), [0, 0])
        for send in self.step.sends:
            pair = _pair(send.source, send.target)
            if pair not in {_pair(chunks[a], chunks[b]) for a, b in sizes}:
                sizes[_pair(*map(chunks.index, pair))] = [0, 0]
        return tuple(
            StageHop(*pair, ahead, back, *self.shapes.hop)
            for pair, (ahead, back) in sorted(sizes.items())
        )

    def plan(self, search: Search, started: float) -> PlanData:
        """Return one plan of all planned submeshes.

        Args:
          search: the search of the user's step.
          started: `time.monotonic()` when the search began.
        """
        groups, of_step, shapes = self.groups, self.of_step, self.shapes
        first = max(groups, key=lambda g: g.plan.predicted.peak_bytes).plan
        mesh_axes, at = shapes.mesh_axes, shapes.stage_axis
        devices = stage_devices(mesh_axes, shapes.places)
        program = search.traced.program
        notes = [n for g in groups for n in g.plan.notes]
        request = search.request
        if inside := {p.key for p in request.value_pins.values()}:
            keys = ", ".join(sorted(inside))
            notes.append(
                f"pins of inner values have no effect in several stages: {keys}."
            )
        if search.refine:
            notes.append(
                "`refine` compiles no plans of several stages: `plan.verify` does."
            )
        parts, step_s = [g.plan.predicted for g in groups], self.simulation.step_time_s
        compute_s = max(p.compute_s for p in parts)
        predicted = Predicted(
            step_time_s=step_s,
            compute_s=compute_s,
            communication_s=max(step_s - compute_s, 0.0),
            peak_bytes=self.simulation.peak_bytes,
            flops_per_device=max(p.flops_per_device for p in parts),
        )
        # The mean over devices; the rest is idle time.
        lines = [
            line
            for group, own in zip(groups, devices, strict=True)
            for line in scaled(group.plan.line_times, len(own) / sum(map(len, devices)))
        ]
        idle_s = step_s - sum(line.seconds for line in lines)
        return replace(
            first,
            program_name=program.name,
            fingerprint=fingerprint(program, mesh_axes),
            mesh_axes=mesh_axes,
            memory_budget_bytes=request.whole_budget_bytes,
            inputs=_whole(
                of_step.inputs,
                map(self._input, range(len(of_step.inputs))),
                [program.values[e.value].shape for e in program.inputs],
                at,
            ),
            outputs=_whole(
                of_step.outputs,
                map(self._output, range(len(of_step.outputs))),
                [program.values[e.value].shape for e in program.outputs],
                at,
            ),
            stages=tuple(
                StagePlan(
                    mesh_axes=group.plan.mesh_axes,
                    devices=tuple(own),
                    decisions=group.plan.decisions,
                    predicted=group.plan.predicted,
                    sends=tuple(self._sends(group.group)),
                )
                for group, own in zip(groups, devices, strict=True)
            ),
            collectives=tuple(c for g in groups for c in g.plan.collectives),
            transforms=search.transforms,
            pipeline=self.pipeline,
            recipes={},
            timeline=Timeline(),
            pins=pins_text(
                search.running.program,
                replace(request, value_pins={}),
                [name for name, _ in mesh_axes],
            ),
            notes=tuple(dict.fromkeys(notes)),
            predicted=predicted,
            search=replace(
                first.search,
                status="feasible",
                objective_s=step_s,
                bound_s=0.0,
                gap=1.0,
                seconds=time.monotonic() - started,
            ),
            line_times=summed([*lines, LineTime("", idle_s=max(idle_s, 0.0))]),
        )

    def _replicated(self, path: str, value_id: int) -> Leaf:
        value = self.of_step.program.values[value_id]
        spec = replicated(value.rank)
        return Leaf(path, value.shape, value.dtype, spec, value.bytes)

    def _input(self, position: int) -> Leaf:
        home, key = self.step.home[position], ValueKey(ValueKind.INPUT, position)
        entry, group = self.of_step.program.inputs[position], self.groups[home]
        leaf = self._replicated(entry.path, entry.value)
        if key in group.of.arguments:
            leaf = group.plan.inputs[group.of.arguments.index(key)]
        return replace(leaf, path=entry.path, stage=home, is_donated=entry.is_donated)

    def _output(self, position: int) -> Leaf:
        end = self.of_step.program.outputs[position]
        made = self.step.outputs[position]
        if not isinstance(made, tuple):
            return self._replicated(end.path, end.value)
        home, key = made
        if key.kind is ValueKind.INPUT:
            leaf = self._input(key.number)
            return replace(leaf, path=end.path, is_donated=False)
        group = self.groups[home]
        leaf = group.plan.outputs[group.of.results.index(key)]
        return replace(leaf, path=end.path, stage=home)

    def _sends(self, position: int) -> Iterator[StageSend]:
        step, (bytes_per_s, _) = self.step, self.shapes.hop
        for send in step.sends:
            if send.source == position:
                is_inside = send.key.kind is ValueKind.INSIDE
                times = step.micro_batches if is_inside else 1
                aval = step.types[send.key]
                size = times * int(aval.size) * int(getattr(aval.dtype, "itemsize", 4))
                local = times * self._bytes(position, send.target, send.key)
                what = f"{aval.dtype.name}{list(aval.shape)} of a {send.kind} pass"
                yield StageSend(send.target, what, size, local / bytes_per_s)


def _pair(a: int, b: int) -> tuple[int, int]:
    return min(a, b), max(a, b)


def _whole(
    ends: Sequence[End],
    leaves: Iterable[Leaf],
    shapes: Sequence[tuple[int, ...]],
    at: int,
) -> tuple[Leaf, ...]:
    """Return the leaves of the user's step: a split stack is one array over its stages.

    Args:
      ends, leaves: inputs or outputs of the step with split stacks, and their leaves.
      shapes: shapes of the inputs or outputs of the user's step.
      at: position of the stage axis.
    """
    found: dict[int, Leaf] = {}
    for end, leaf in zip(ends, leaves, strict=True):
        if end.part is None:
            found[end.whole] = leaf
            continue
        before = found.get(end.whole)
        if before is None:
            first, *rest = without(leaf.spec, [at])
            found[end.whole] = replace(
                leaf,
                path=leaf.path[: leaf.path.rindex("[")],
                shape=shapes[end.whole],
                spec=((at, *first), *rest),
            )
            continue
        if leaf.stage != before.stage + end.part:
            raise StageError(
                f"`{leaf.path}` is not on the stage after the part before it.",
                where=leaf.path,
                numbers=f"stage {leaf.stage}; the first part is on stage"
                f" {before.stage}",
                fix="write the layers one by one instead of in a loop.",
            )
        found[end.whole] = replace(before, num_stages=end.part + 1)
    return tuple(found[i] for i in range(len(found)))
