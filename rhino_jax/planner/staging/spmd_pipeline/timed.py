"""The ticks of an SPMD pipeline's stages, by predicted seconds.

All seconds of the predicted step are counted, each once: those of ops with collectives
that they wait for (`planner.staging.shapes.seconds_by_op`), and those of
transfers between stages. So the step of the pipeline is the predicted step, which has
precedence: the total of the ops is searched and compared, and only distributed over
ticks here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rhino_jax.ir.collectives import KINDS, PERMUTE
from rhino_jax.ir.op import Op, RegionKind
from rhino_jax.ir.program import Program
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.records import Collective, Predicted
from rhino_jax.plan.stages import (
    IN_ONE_PROGRAM,
    Between,
    Pipeline,
    PipelinePass,
    StageCost,
    StagePlan,
    StageSend,
)
from rhino_jax.planner.meshes import MeshAxes, own_mesh, stage_devices
from rhino_jax.planner.staging.shapes import with_regions


@dataclass(frozen=True, slots=True)
class OpSend:
    """A transfer of an op to other stages.

    Attributes:
      op: id of the op.
      local_bytes: bytes of one device, each time.
      collective: the collective of all times.
    """

    op: int
    local_bytes: int
    collective: Collective


def pipeline_of(
    program: Program,
    stages: int,
    count: int,
    seconds: Mapping[int, float],
    sent: Sequence[OpSend],
) -> Pipeline:
    """Return the pipeline of the stages; its memory is not known yet.

    Args:
      program: one stage's program.
      stages: the number of stages.
      count: the number of micro-batches.
      seconds: seconds of every op in a step.
      sent: transfers of the ops of all regions.
    """
    ticks = count + stages - 1
    by_op = {s.op: s for s in sent}
    passes: list[PipelinePass] = []
    once_s = 0.0
    for op in (program.ops[o] for o in program.body.ops):
        every = [inner for inner, _ in program.within(op)]
        work_s = with_regions(program, seconds, op.id)
        handed = [by_op[o.id] for o in every if o.id in by_op]
        send_s = sum(s.collective.seconds for s in handed)
        permutes = _permutes(program, op, ticks)
        if not permutes:
            once_s += work_s + send_s
            continue
        # Whether stages send to those before them: `frontend.provenance` has the label.
        ends = permutes[0].label.partition(",")[0]
        source, _, target = ends.partition(" → ")
        passes.append(
            PipelinePass(
                tick_s=work_s / ticks,
                send_s=send_s / ticks,
                send_bytes=sum(s.local_bytes for s in handed),
                before_s=once_s,
                is_backward=any(o.flops and o.source.is_backward for o in every),
                is_reversed=int(source) > int(target),
            )
        )
        once_s = 0.0
    before_s = sum(p.before_s for p in passes)
    cost = StageCost(
        forward_s=sum(p.tick_s for p in passes if not p.is_backward),
        backward_s=sum(p.tick_s for p in passes if p.is_backward),
        update_s=once_s,
        activation_bytes=0,
        fixed_bytes=0,
        working_bytes=0,
    )
    return Pipeline(
        micro_batches=count,
        schedule=IN_ONE_PROGRAM,
        runs=(),
        costs=(cost,) * stages,
        hops=(),
        between=(Between(before_s),) * stages,
        passes=tuple(passes),
    )


def _permutes(program: Program, op: Op, ticks: int) -> list[Op]:
    """Return a tick loop's permutes to the next stage; empty for other ops."""
    call = op.call
    if call is None or call.kind is not RegionKind.SCAN or call.trip_count != ticks:
        return []
    inner = [program.ops[o] for region in call.regions for o in region.ops]
    return [o for o in inner if o.name in KINDS[PERMUTE].primitives]


def left_bytes(program: Program, ticks: int, local_bytes: Mapping[int, float]) -> int:
    """Return the bytes per device that loops over ticks save of every tick.

    Args:
      program: one stage's program.
      ticks: ticks of a pass.
      local_bytes: bytes per device of the results of those loops.
    """
    total = 0.0
    for op in (program.ops[o] for o in program.body.ops):
        if op.call is None or not _permutes(program, op, ticks):
            continue
        total += sum(local_bytes[v] for v in op.call.stacked(op.results)) / ticks
    return int(total)


def holding(pipeline: Pipeline, left: int, fixed: int, peak: int) -> Pipeline:
    """Return the pipeline with the memory of its stages, at most the predicted peak.

    The residuals of all ticks are allocated from the first tick on. The rest, other
    than arguments, is working memory of ops.

    Args:
      pipeline: the pipeline without memory.
      left: bytes that passes save on each tick.
      fixed: bytes of arguments.
      peak: predicted peak of the step in bytes.
    """
    fixed = min(fixed, peak)
    handed = max((p.send_bytes for p in pipeline.passes), default=0)
    left = min(left, max(peak - fixed - handed, 0) // pipeline.ticks)
    costs = tuple(
        replace(
            cost,
            activation_bytes=left,
            fixed_bytes=fixed,
            working_bytes=peak - fixed - left * pipeline.ticks,
        )
        for cost in pipeline.costs
    )
    return replace(pipeline, costs=costs)


def stages_of(
    plan: PlanData,
    pipeline: Pipeline,
    axes: MeshAxes,
    axis: int,
    inputs: Iterable[Leaf],
    predicted: Predicted,
) -> tuple[StagePlan, ...]:
    """Return the records of all stages.

    Args:
      plan: the plan of one stage's program.
      pipeline: the pipeline of all stages.
      axes: (name, size) of the axes of all devices.
      axis: position of the stage axis.
      inputs: inputs of the plan of all stages.
      predicted: predictions for a step; each stage takes all of it.
    """
    devices = stage_devices(axes, (1,) * axes[axis][1])
    (of_one,) = plan.stages
    depths = sorted({x.shape[0] for x in inputs if x.spec and axis in x.spec[0]})
    return tuple(
        replace(
            of_one,
            mesh_axes=own_mesh(axes, 1),
            devices=tuple(own),
            predicted=predicted,
            sends=tuple(
                StageSend(
                    to,
                    f"activations of layers in pass {i}, {pipeline.ticks} times",
                    one.send_bytes * len(own) * pipeline.ticks,
                    one.send_s * pipeline.ticks,
                )
                for i, one in enumerate(pipeline.passes)
                for to in [stage - 1 if one.is_reversed else stage + 1]
                if 0 <= to < len(pipeline.costs)
            ),
            layers=tuple(
                (stage * n // len(devices), (stage + 1) * n // len(devices))
                for n in depths
            ),
        )
        for stage, own in enumerate(devices)
    )
