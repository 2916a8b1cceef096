"""One plan of all planned submeshes and their pipeline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.errors import StageError
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import replicated, without
from rhino_jax.passes.staged.stacks import End, Unstacked
from rhino_jax.passes.staged.step import StagedStep, ValueKey, ValueKind
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.lines import scaled, summed
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.records import LineTime, Predicted, Timeline
from rhino_jax.plan.stages import Pipeline, StagePlan, StageSend
from rhino_jax.planner.meshes import stage_devices
from rhino_jax.planner.search.read_back.assemble import pins_text
from rhino_jax.planner.staging.planned import PlannedGroup
from rhino_jax.planner.staging.shapes import GroupMeshes
from rhino_jax.planner.staging.transfers import bytes_between
from rhino_jax.planner.variant_search import Search


def assemble_plan(
    search: Search,
    of_step: Unstacked,
    step: StagedStep,
    groups: Sequence[PlannedGroup],
    pipeline: Pipeline,
    shapes: GroupMeshes,
    started: float,
) -> PlanData:
    """Return one plan of all planned submeshes.

    Args:
      search: the search of the user's step.
      of_step: the step, with layer stacks split.
      step, groups: the tasks, and the planned submeshes.
      pipeline: the pipeline of these.
      shapes: the submeshes.
      started: `time.monotonic()` when the search began.
    """
    first = max(groups, key=lambda g: g.plan.predicted.peak_bytes).plan
    mesh_axes, at = shapes.mesh_axes, shapes.stage_axis
    devices = stage_devices(mesh_axes, shapes.places)
    program, results = search.traced.program, range(len(step.outputs))
    notes = [n for g in groups for n in g.plan.notes]
    if search.request.value_pins:
        keys = ", ".join(sorted({p.key for p in search.request.value_pins.values()}))
        notes.append(f"pins of inner values have no effect in several stages: {keys}.")
    if search.refine:
        notes.append(
            "`refine` compiles no plans of several stages: `plan.verify` does."
        )
    plan = replace(
        first,
        program_name=program.name,
        fingerprint=fingerprint(program, mesh_axes),
        mesh_axes=mesh_axes,
        memory_budget_bytes=search.request.whole_budget_bytes,
        inputs=_whole(
            of_step.inputs,
            [_input(step, groups, of_step.program, i) for i in range(len(step.home))],
            [program.values[e.value].shape for e in program.inputs],
            at,
        ),
        outputs=_whole(
            of_step.outputs,
            [_output(step, groups, of_step.program, j) for j in results],
            [program.values[e.value].shape for e in program.outputs],
            at,
        ),
        stages=tuple(
            StagePlan(
                mesh_axes=group.plan.mesh_axes,
                devices=tuple(devices[i]),
                decisions=group.plan.decisions,
                predicted=group.plan.predicted,
                sends=_sends(step, groups, i, pipeline),
            )
            for i, group in enumerate(groups)
        ),
        collectives=tuple(c for g in groups for c in g.plan.collectives),
        transforms=search.transforms,
        pipeline=pipeline,
        recipes={},
        timeline=Timeline(),
        pins=pins_text(
            search.running.program,
            replace(search.request, value_pins={}),
            [name for name, _ in mesh_axes],
        ),
        notes=tuple(dict.fromkeys(notes)),
    )
    simulation = simulate(schedule_of(pipeline))
    parts, step_s = [g.plan.predicted for g in groups], simulation.step_time_s
    compute_s = max(p.compute_s for p in parts)
    predicted = Predicted(
        step_time_s=step_s,
        compute_s=compute_s,
        communication_s=max(step_s - compute_s, 0.0),
        peak_bytes=simulation.peak_bytes,
        flops_per_device=max(p.flops_per_device for p in parts),
    )
    report = replace(
        plan.search,
        status="feasible",
        objective_s=predicted.step_time_s,
        bound_s=0.0,
        gap=1.0,
        seconds=time.monotonic() - started,
    )
    # The mean over devices; the rest is idle time.
    lines = [
        line
        for group, own in zip(groups, devices, strict=True)
        for line in scaled(group.plan.line_times, len(own) / sum(map(len, devices)))
    ]
    idle_s = predicted.step_time_s - sum(line.seconds for line in lines)
    times = summed([*lines, LineTime("", idle_s=max(idle_s, 0.0))])
    return replace(plan, predicted=predicted, search=report, line_times=times)


def _whole(
    ends: Sequence[End],
    leaves: Sequence[Leaf],
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


def _input(
    step: StagedStep, groups: Sequence[PlannedGroup], program: Program, position: int
) -> Leaf:
    entry, home = program.inputs[position], step.home[position]
    group, key = groups[home], ValueKey(ValueKind.INPUT, position)
    if key in group.of.arguments:
        leaf = group.plan.inputs[group.of.arguments.index(key)]
    else:
        value = program.values[entry.value]
        spec = replicated(value.rank)
        leaf = Leaf(entry.path, value.shape, value.dtype, spec, value.bytes)
    return replace(leaf, path=entry.path, stage=home, is_donated=entry.is_donated)


def _output(
    step: StagedStep, groups: Sequence[PlannedGroup], program: Program, position: int
) -> Leaf:
    end, made = program.outputs[position], step.outputs[position]
    value = program.values[end.value]
    if not isinstance(made, tuple):
        return Leaf(
            end.path, value.shape, value.dtype, replicated(value.rank), value.bytes
        )
    home, key = made
    if key.kind is ValueKind.INPUT:
        leaf = _input(step, groups, program, key.number)
        return replace(leaf, path=end.path, is_donated=False)
    group = groups[home]
    leaf = group.plan.outputs[group.of.results.index(key)]
    return replace(leaf, path=end.path, stage=home)


def _sends(
    step: StagedStep, groups: Sequence[PlannedGroup], position: int, pipeline: Pipeline
) -> tuple[StageSend, ...]:
    of = step.chunks
    rates = {
        (min(of[h.source], of[h.target]), max(of[h.source], of[h.target])): (
            h.bytes_per_s
        )
        for h in pipeline.hops
    }
    found = []
    for send in step.sends:
        if send.source != position:
            continue
        pair = min(send.source, send.target), max(send.source, send.target)
        times = pipeline.micro_batches if send.key.kind is ValueKind.INSIDE else 1
        aval = step.types[send.key]
        size = times * int(aval.size) * int(getattr(aval.dtype, "itemsize", 4))
        ends = groups[position], groups[send.target]
        local = times * bytes_between(step, *ends, send.key)
        what = f"{aval.dtype.name}{list(aval.shape)} of a {send.kind} pass"
        found.append(StageSend(send.target, what, size, local / rates[pair]))
    return tuple(found)
