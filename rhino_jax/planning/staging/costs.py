"""What the tasks of planned groups cost, and what passes between them."""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.plan.stages import Hop, StageCost
from rhino_jax.planning.staging.groups import PlannedGroup
from rhino_jax.planning.staging.priced import with_regions
from rhino_jax.transform.staged.step import Kind, Step, TaskKind


def stage_cost(step: Step, group: PlannedGroup) -> StageCost:
    """What the tasks of a planned group take and hold."""
    program = group.of.program
    parts = dict.fromkeys(TaskKind, 0.0)
    for task, op_id in zip(group.of.tasks, program.body.ops, strict=True):
        parts[task.kind] += with_regions(program, group.seconds, op_id)
    times = step.micro_batches
    once = parts[TaskKind.START] + parts[TaskKind.UPDATE]
    left, fixed = group.left_bytes(step), group.fixed_bytes(step)
    peak = group.plan.predicted.peak_bytes
    return StageCost(
        forward_s=parts[TaskKind.FORWARD] / times,
        backward_s=parts[TaskKind.BACKWARD] / times,
        update_s=once,
        activation_bytes=left,
        fixed_bytes=fixed,
        working_bytes=max(peak - fixed - left, 0),
    )


def hops_of(
    step: Step, groups: Sequence[PlannedGroup], bytes_per_s: float, latency_s: float
) -> tuple[Hop, ...]:
    """Between which groups anything passes, and how much for every micro-batch: sums
    over all of them, and what updates exchange, pass once a step."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for send in step.sends:
        pair = min(send.source, send.target), max(send.source, send.target)
        into = sizes.setdefault(pair, [0, 0])
        if send.key.kind is Kind.INSIDE:
            is_back = send.source > send.target
            into[is_back] += groups[send.source].bytes(step, send.key)
    return tuple(
        Hop(a, b, forward, backward, bytes_per_s, latency_s)
        for (a, b), (forward, backward) in sorted(sizes.items())
    )
