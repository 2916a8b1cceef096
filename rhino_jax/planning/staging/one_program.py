"""A plan of several stages that are one program: an axis of its mesh.

What one stage does (`transform.one_program`) is a program of its own, with its layers,
its sums and as many ticks as all micro-batches take to pass. It is planned on one
stage's devices, so the bubble, what all micro-batches leave for the backward pass, and
what lies between layers are in what it is predicted to cost. What stages send each
other comes on top.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rhino_jax.cost.collectives import (
    ALL_GATHER,
    PERMUTE,
    collective_s,
    wire_bytes,
)
from rhino_jax.errors import InfeasiblePlanError, PinError, StageError
from rhino_jax.frontend.manual import KINDS
from rhino_jax.hardware.layout import lay_out
from rhino_jax.ir.op import Op
from rhino_jax.ir.program import Program, Region
from rhino_jax.ir.spec import Spec, format_spec, share_of, without
from rhino_jax.ir.transform import ONE_PROGRAM, chosen
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.plan import Leaf, Plan
from rhino_jax.plan.records import Collective, Variant
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.planning.meshes import MeshAxes, own_mesh
from rhino_jax.planning.search import Search
from rhino_jax.planning.staging.counts import counts_of, rows_of
from rhino_jax.planning.variants import cut_in
from rhino_jax.transform.recompute.as_kept import has_remat
from rhino_jax.units import format_share


def plan_in_one_program(
    search: Search,
    places: Sequence[int],
    microbatches: int | str,
    per_microbatch: tuple[str, ...] = (),
) -> Plan:
    """The plan of a step whose layers are spread over an axis of the mesh.

    Args:
      search: of the step as its user wrote it.
      places: of every stage along the axis.
      microbatches: how many; "auto": the best of a few counts.
      per_microbatch: where sums over the batch are those of a micro-batch.
    Raises:
      StageError, MicrobatchError, InfeasiblePlanError, PinError.
    """
    stages = len(places)
    if {*places} != {1}:
        raise StageError(
            "stages of one program have equal groups of devices, each one place of the"
            f" mesh along `{STAGE_AXIS}`.",
            where="`stages=`",
            numbers=f"{' + '.join(map(str, places))} places",
            fix=f"take stages={stages} and a mesh with {STAGE_AXIS}={stages}, or"
            " another schedule, as schedule='1f1b'.",
        )
    started, found = time.monotonic(), list[Plan]()
    failed: InfeasiblePlanError | None = None
    for count in _counts(search, stages, microbatches, per_microbatch):
        try:
            found.append(_planned(search, stages, count, per_microbatch))
        except InfeasiblePlanError as error:
            failed = error
    if not found:
        assert failed is not None
        raise failed
    best = min(found, key=lambda p: p.predicted.step_time_s)
    report = replace(best.search, seconds=time.monotonic() - started)
    variants = tuple(
        Variant(
            f"{p.microbatches} micro-batches",
            p.predicted.step_time_s,
            p.predicted.peak_bytes,
            p is best,
        )
        for p in found
    )
    return replace(best, search=report, variants=variants if len(variants) > 1 else ())


def _counts(
    search: Search, stages: int, microbatches: int | str, places: tuple[str, ...]
) -> list[int]:
    """Numbers of micro-batches to be compared."""
    if isinstance(microbatches, int):
        return [microbatches]
    traced = search.running
    rows = rows_of(traced.closed_jaxpr, traced.program, places)
    counts = next(counts_of(rows, stages, stages), None)
    if counts is None:
        raise StageError(
            f"no number of micro-batches is a multiple of {stages} stages, which share"
            " what is in no layer.",
            where="`stages=`",
            numbers=f"a batch of {rows} rows",
            fix=f"take a batch of a multiple of {stages} rows, or another schedule.",
        )
    return counts


def _planned(
    search: Search, stages: int, count: int, per_microbatch: tuple[str, ...]
) -> Plan:
    own = [own_mesh(axes, 1) for axes in search.meshes]
    devices = math.prod(n for _, n in own[0])
    target = search.target.replace(num_devices=devices)
    of_stage = replace(search, mesh=None, meshes=own, target=target, refine=0).after(
        [cut_in(count, per_microbatch), chosen(ONE_PROGRAM, {"stages": stages})]
    )
    request = of_stage.request
    at = {axes: [n for n, _ in axes].index(STAGE_AXIS) for axes in search.meshes}
    (axis,) = {*at.values()}
    asked = of_stage.asking(
        pins={i: without(s, [axis]) for i, s in request.pins.items()},
        output_pins={i: without(s, [axis]) for i, s in request.output_pins.items()},
        value_pins={
            v: replace(p, spec=_without(p.spec, axis))
            for v, p in request.value_pins.items()
        },
        has_recipes=False,
    )
    found = asked.find()
    axes = search.meshes[own.index(found.mesh_axes)]
    whole = _Whole(search, asked.running.program, axes, axis)
    return whole.plan(found.plan(), count)


def _without(
    spec: tuple[tuple[int, ...] | None, ...], axis: int
) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(None if d is None else without((d,), [axis])[0] for d in spec)


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """From the plan of one stage to that of all.

    Attributes:
      search: of the step.
      of_stage: what one stage does.
      axes: of the mesh of all devices.
      axis: position of that of the stages.
    """

    search: Search
    of_stage: Program
    axes: MeshAxes
    axis: int

    @property
    def stages(self) -> int:
        return self.axes[self.axis][1]

    def plan(self, plan: Plan, count: int) -> Plan:
        program = self.search.traced.program
        sent = tuple(self._sent(plan.decisions))
        seconds = sum(c.seconds for c in sent)
        predicted = replace(
            plan.predicted,
            step_time_s=plan.predicted.step_time_s + seconds,
            communication_s=plan.predicted.communication_s + seconds,
        )
        report = replace(
            plan.search,
            objective_s=plan.search.objective_s + seconds,
            bound_s=plan.search.bound_s + seconds,
        )
        shapes = [
            [program.values[e.value].shape for e in ends]
            for ends in (program.inputs, program.outputs)
        ]
        (stage,) = plan.stages
        whole = replace(
            plan,
            mesh_axes=self.axes,
            inputs=tuple(map(self._leaf, plan.inputs, shapes[0])),
            outputs=tuple(map(self._leaf, plan.outputs, shapes[1])),
            stages=(
                replace(
                    stage,
                    mesh_axes=self.axes,
                    devices=tuple(range(math.prod(n for _, n in self.axes))),
                    predicted=predicted,
                ),
            ),
            predicted=predicted,
            collectives=tuple(
                sorted((*plan.collectives, *sent), key=lambda c: -c.seconds)
            ),
            search=report,
            recipes={},
            notes=(*self._notes(count), *plan.notes),
        )
        self._check_pins(whole)
        return self.search.told(whole)

    def _leaf(self, leaf: Leaf, shape: tuple[int, ...]) -> Leaf:
        """Of a stack, over the axis of the stages."""
        spec = without(leaf.spec, [self.axis])
        if leaf.shape != shape:
            spec = ((self.axis, *spec[0]), *spec[1:])
        return replace(leaf, shape=shape, spec=spec)

    def _notes(self, count: int) -> Iterator[str]:
        stages, ticks = self.stages, count + self.stages - 1
        yield (
            f"one program: its {stages} stages are the axis `{STAGE_AXIS}` of the mesh,"
            f" each with 1/{stages} of the layers; {count} micro-batches pass in"
            f" {ticks} ticks forward and as many back, a bubble of"
            f" {format_share((stages - 1) / ticks)} (in the predicted step)."
        )
        loops = {
            op.id
            for op, runs in _ops(self.of_stage, self.of_stage.body, 1)
            if runs == ticks and KINDS.get(op.name) == PERMUTE
        }
        if len(loops) > 1 and not has_remat(self.of_stage):
            yield (
                "layers have no `jax.checkpoint`: what they leave for the backward pass"
                " is held of all micro-batches, and copied on every tick to where it is"
                " held and from there."
            )

    def _check_pins(self, plan: Plan) -> None:
        names = [n for n, _ in self.axes]
        request = self.search.request
        for pins, leaves in (
            (request.pins, plan.inputs),
            (request.output_pins, plan.outputs),
        ):
            for i, spec in pins.items():
                at = [self.axis in dim for dim in spec]
                if not any(at) or at == [self.axis in d for d in leaves[i].spec]:
                    continue
                raise PinError(
                    f"pin {leaves[i].path!r}: over the stages of one program only"
                    " stacks of layers lie, by their first dim.",
                    where=repr(leaves[i].path),
                    numbers=f"pinned {format_spec(spec, names)}, planned"
                    f" {format_spec(leaves[i].spec, names)}",
                    fix=f"leave `{STAGE_AXIS}` out of the pin.",
                )

    def _sent(self, decisions: Decisions) -> Iterator[Collective]:
        """What stages send each other."""
        laid = lay_out(self.search.target, self.axes)
        for op, runs in _ops(self.of_stage, self.of_stage.body, 1):
            kind = KINDS.get(op.name)
            if kind is None:
                continue
            moved = op.results if kind == ALL_GATHER else op.operands
            local = sum(self._local_bytes(decisions, v) for v in moved)
            each_s = collective_s(kind, local, [laid.axes[self.axis]])
            yield Collective(
                kind=kind,
                axes=(STAGE_AXIS,),
                bytes=round(wire_bytes(kind, local, self.stages) * runs),
                count=runs,
                seconds=each_s * runs,
                op=f"{op.name} #{op.id}",
                source=str(op.source),
                reason="between stages",
            )

    def _local_bytes(self, decisions: Decisions, value: int) -> float:
        of = self.of_stage.values[value]
        spec: Spec | None = decisions.values.get(value)
        if spec is None or len(spec) != len(of.shape):
            return float(of.bytes)
        sizes = tuple(n for _, n in own_mesh(self.axes, 1))
        return of.bytes * share_of(spec, of.shape, sizes)


def _ops(program: Program, region: Region, runs: int) -> Iterator[tuple[Op, int]]:
    """All ops, and how often each runs."""
    for op in (program.ops[o] for o in region.ops):
        yield op, runs
        if op.call is not None:
            for inner in op.call.regions:
                yield from _ops(program, inner, runs * op.call.trip_count)
