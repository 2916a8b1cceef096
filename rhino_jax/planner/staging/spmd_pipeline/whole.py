"""From the plan of one stage's program to that of an SPMD pipeline.

One stage's program (`passes.spmd_pipeline`) has its layers, its reductions and the
ticks of all micro-batches. It is planned on one stage's devices, so its predicted cost
includes the bubble, the residuals of all micro-batches, and the ops between layers.
Transfers between stages are added here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rhino_jax.cost.collectives import collective_s, wire_bytes
from rhino_jax.errors import PinError
from rhino_jax.hardware.layout import lay_out
from rhino_jax.ir.collectives import KINDS, OF_PRIMITIVE, PERMUTE
from rhino_jax.ir.op import Op
from rhino_jax.ir.program import Program, Region
from rhino_jax.ir.spec import Spec, format_spec, share_of, without
from rhino_jax.ir.transform import RECOMPUTE
from rhino_jax.passes.remat.unremat import has_remat
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.lines import sent as lines_of, summed
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.records import Collective
from rhino_jax.plan.stages import STAGE_AXIS, Pipeline
from rhino_jax.planner.meshes import MeshAxes, own_mesh
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.staging.costs import seconds_by_op
from rhino_jax.planner.staging.spmd_pipeline.timed import (
    OpSend,
    holding,
    left_bytes,
    pipeline_of,
    stages_of,
)
from rhino_jax.planner.variant_search import Search


@dataclass(frozen=True, slots=True, eq=False)
class WholePipeline:
    """The step from the plan of one stage to that of all stages.

    Attributes:
      search: the search of the whole step.
      of_stage: one stage's program.
      axes: (name, size) of the axes of all devices.
      axis: position of the stage axis.
    """

    search: Search
    of_stage: Program
    axes: MeshAxes
    axis: int

    @property
    def stages(self) -> int:
        return self.axes[self.axis][1]

    def step_s(self, found: SearchResult) -> float:
        """Return the step of all stages in seconds, from the result of one; infinite
        where nothing fits."""
        if not found.fits:
            return math.inf
        sent = self._sent(found.decisions())
        return found.step_s + sum(s.collective.seconds for s in sent)

    def plan(self, found: SearchResult) -> PlanData:
        """Return the plan of all stages, from the result of one.

        Raises:
          InfeasiblePlanError: nothing fits.
          PinError: a pin shards something over the stage axis that is no stack of
            layers.
        """
        plan = found.plan()
        program = self.search.traced.program
        sent = tuple(self._sent(plan.decisions))
        collectives = [s.collective for s in sent]
        seconds = sum(c.seconds for c in collectives)
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
        inputs = tuple(map(self._leaf, plan.inputs, shapes[0]))
        pipeline = self._pipeline(found, plan, sent)
        whole = replace(
            plan,
            mesh_axes=self.axes,
            inputs=inputs,
            outputs=tuple(map(self._leaf, plan.outputs, shapes[1])),
            stages=stages_of(plan, pipeline, self.axes, self.axis, inputs, predicted),
            pipeline=pipeline,
            predicted=predicted,
            line_times=summed([*plan.line_times, *lines_of(collectives, seconds)]),
            collectives=tuple(
                sorted((*plan.collectives, *collectives), key=lambda c: -c.seconds)
            ),
            search=report,
            recipes={},
            notes=(*self._notes(plan.microbatches), *plan.notes),
        )
        self._check_pins(whole)
        return self.search.told(whole)

    def _pipeline(
        self, found: SearchResult, plan: PlanData, sent: Sequence[OpSend]
    ) -> Pipeline:
        """Return the pipeline of all stages, from the plan of one."""
        program, count = self.of_stage, plan.microbatches
        pipeline = pipeline_of(program, self.stages, count, seconds_by_op(found), sent)
        held = {
            v: self._local_bytes(plan.decisions, v)
            for op in program.body.ops
            for v in program.ops[op].results
        }
        return holding(
            pipeline,
            left=left_bytes(program, pipeline.ticks, held),
            fixed=sum(leaf.bytes_per_device for leaf in plan.inputs),
            peak=plan.predicted.peak_bytes,
        )

    def _leaf(self, leaf: Leaf, shape: tuple[int, ...]) -> Leaf:
        """Return the leaf of all stages: a stack is sharded over the stage axis."""
        spec = without(leaf.spec, [self.axis])
        if leaf.shape != shape:
            spec = ((self.axis, *spec[0]), *spec[1:])
        return replace(leaf, shape=shape, spec=spec, num_stages=self.stages)

    def _notes(self, count: int) -> Iterator[str]:
        stages, ticks = self.stages, count + self.stages - 1
        yield (
            f"one program: its {stages} stages are the axis `{STAGE_AXIS}` of the mesh,"
            f" each with 1/{stages} of the layers; {count} micro-batches pass in"
            f" {ticks} ticks forward and as many back, in {stages - 1} of which a stage"
            " has no micro-batch."
        )
        loops = {
            op.id
            for op, runs in _ops(self.of_stage, self.of_stage.body, 1)
            if runs == ticks and op.name in KINDS[PERMUTE].primitives
        }
        if len(loops) < 2:
            return
        left = (
            "their residuals are live for all micro-batches, and"
            " copied on every tick to their buffers and back"
        )
        if any(t.name == RECOMPUTE for t in self.of_stage.transforms):
            yield f"layers make some again in the backward pass: {left}."
        elif not has_remat(self.of_stage):
            yield f"layers make nothing again in the backward pass: {left}."

    def _check_pins(self, plan: PlanData) -> None:
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

    def _sent(self, decisions: Decisions) -> Iterator[OpSend]:
        """Yield the transfers between stages."""
        laid = lay_out(self.search.target, self.axes)
        for op, runs in _ops(self.of_stage, self.of_stage.body, 1):
            kind = OF_PRIMITIVE.get(op.name)
            if kind is None:
                continue
            moved = op.results if kind.gathers else op.operands
            local = sum(self._local_bytes(decisions, v) for v in moved)
            each_s = collective_s(kind.name, local, [laid.axes[self.axis]])
            sent = Collective(
                kind=kind.name,
                axes=(STAGE_AXIS,),
                bytes=round(wire_bytes(kind.name, local, self.stages) * runs),
                count=runs,
                seconds=each_s * runs,
                op=f"{op.name} #{op.id}",
                source=str(op.source),
                reason="between stages",
            )
            yield OpSend(op.id, round(local), sent)

    def _local_bytes(self, decisions: Decisions, value: int) -> float:
        of = self.of_stage.values[value]
        spec: Spec | None = decisions.values.get(value)
        if spec is None or len(spec) != len(of.shape):
            return float(of.bytes)
        sizes = tuple(n for _, n in own_mesh(self.axes, 1))
        return of.bytes * share_of(spec, of.shape, sizes)


def _ops(program: Program, region: Region, runs: int) -> Iterator[tuple[Op, int]]:
    """Yield all ops, with their number of runs in a step."""
    for op in (program.ops[o] for o in region.ops):
        yield op, runs
        if op.call is not None:
            for inner in op.call.regions:
                yield from _ops(program, inner, runs * op.call.trip_count)
