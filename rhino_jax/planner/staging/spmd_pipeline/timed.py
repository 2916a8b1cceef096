"""When stages of one program do what: the ticks of its passes, by predicted seconds.

All seconds of the predicted step are there, each once: what ops take with collectives
that they wait for (`staging.priced.seconds_by_op`), and what stages send each other.
So the step of the pipeline is the predicted step, which is the truth of the two: what
ops take together is searched and compared, and only shared out here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rhino_jax.cost.collectives import PERMUTE
from rhino_jax.frontend.manual import KINDS
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
from rhino_jax.planner.meshes import MeshAxes, own_mesh


@dataclass(frozen=True, slots=True)
class OpSend:
    """What an op of a stage sends to other stages.

    Attributes:
      op: its number.
      local_bytes: of one device, each time.
      collective: of all times.
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
    """How micro-batches pass through the stages; what they hold is not known yet.

    Args:
      program: what one stage does.
      stages: how many.
      count: of micro-batches.
      seconds: of every op, of a step.
      sent: by the ops of all regions.
    """
    ticks = count + stages - 1
    by_op = {s.op: s for s in sent}
    passes: list[PipelinePass] = []
    once_s = 0.0
    for op in (program.ops[o] for o in program.body.ops):
        every = [op, *_inside(program, op)]
        work_s = sum(seconds.get(o.id, 0.0) for o in every)
        handed = [by_op[o.id] for o in every if o.id in by_op]
        handed_s = sum(s.collective.seconds for s in handed)
        permutes = _permutes(program, op, ticks)
        if not permutes:
            once_s += work_s + handed_s
            continue
        passes.append(
            PipelinePass(
                tick_s=work_s / ticks,
                handed_s=handed_s / ticks,
                handed_bytes=sum(s.local_bytes for s in handed),
                before_s=once_s,
                is_backward=any(o.flops and o.source.is_backward for o in every),
                is_reversed=_is_reversed(permutes[0]),
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
    """Of a loop over ticks, what hands on to the next stage; nothing of other ops."""
    call = op.call
    if call is None or call.kind is not RegionKind.SCAN or call.trip_count != ticks:
        return []
    inner = [program.ops[o] for region in call.regions for o in region.ops]
    return [o for o in inner if KINDS.get(o.name) == PERMUTE]


def _is_reversed(permute: Op) -> bool:
    """Whether stages hand to those before them; `frontend.provenance` has the label."""
    source, _, target = permute.label.partition(",")[0].partition(" → ")
    return int(source) > int(target)


def _inside(program: Program, op: Op) -> Iterator[Op]:
    for region in () if op.call is None else op.call.regions:
        for inner in (program.ops[o] for o in region.ops):
            yield inner
            yield from _inside(program, inner)


def left_bytes(program: Program, ticks: int, local_bytes: Mapping[int, float]) -> int:
    """Bytes that loops over ticks keep of every tick, of one device.

    Args:
      program: what one stage does.
      ticks: of a pass.
      local_bytes: of the values that those loops make.
    """
    total = 0.0
    for op in (program.ops[o] for o in program.body.ops):
        if op.call is None or not _permutes(program, op, ticks):
            continue
        kept = op.results[op.call.num_carry :]
        total += sum(local_bytes[v] for v in kept) / ticks
    return int(total)


def holding(pipeline: Pipeline, left: int, fixed: int, peak: int) -> Pipeline:
    """The pipeline with what its stages hold, at most the predicted peak.

    Room for what all ticks leave is there from the first of them on. What is neither
    that nor arguments, ops take while they run.

    Args:
      pipeline: without.
      left: bytes that passes leave on each tick.
      fixed: of arguments.
      peak: predicted, of the step.
    """
    fixed = min(fixed, peak)
    handed = max((p.handed_bytes for p in pipeline.passes), default=0)
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
    """Records of all stages.

    Args:
      plan: of what one stage does.
      pipeline: of all.
      axes, axis: of the mesh of all devices, and which is that of the stages.
      inputs: of the plan of all.
      predicted: of a step; each stage takes all of it.
    """
    stages = axes[axis][1]
    inner = math.prod(n for _, n in axes[axis + 1 :])
    outer = math.prod(n for _, n in axes[:axis])
    (of_one,) = plan.stages
    depths = sorted({x.shape[0] for x in inputs if x.spec and axis in x.spec[0]})
    return tuple(
        replace(
            of_one,
            mesh_axes=own_mesh(axes, 1),
            devices=tuple(
                (o * stages + stage) * inner + i
                for o in range(outer)
                for i in range(inner)
            ),
            predicted=predicted,
            sends=tuple(_sends(pipeline, stage, outer * inner)),
            layers=tuple(
                (stage * n // stages, (stage + 1) * n // stages) for n in depths
            ),
        )
        for stage in range(stages)
    )


def _sends(pipeline: Pipeline, stage: int, devices: int) -> Iterator[StageSend]:
    for i, one in enumerate(pipeline.passes):
        to = stage - 1 if one.is_reversed else stage + 1
        if 0 <= to < len(pipeline.costs):
            yield StageSend(
                to,
                f"what layers hand on in pass {i}, {pipeline.ticks} times",
                one.handed_bytes * devices * pipeline.ticks,
                one.handed_s * pipeline.ticks,
            )
