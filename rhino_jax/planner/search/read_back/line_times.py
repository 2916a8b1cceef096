"""The compute of a choice by the user's lines, and what bounds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rhino_jax.analysis.equivalence import copied_slices
from rhino_jax.analysis.graph import Node
from rhino_jax.model.build import MeshModel
from rhino_jax.plan.lines import sent, summed
from rhino_jax.plan.records import Collective, LineTime, Predicted
from rhino_jax.planner.search.limits import LIMITS
from rhino_jax.solver.problem import Labels


def line_times(
    model: MeshModel,
    labels: Labels,
    predicted: Predicted,
    collectives: Sequence[Collective],
) -> tuple[LineTime, ...]:
    """Return the seconds of a step by line; together they are the predicted step.

    Seconds of compute that belong to no op (copies between layouts on one device) have
    an empty line.
    """
    lines = [*_compute(model, labels)]
    rest_s = predicted.compute_s - sum(line.seconds for line in lines)
    lines.append(LineTime("", memory_s=max(rest_s, 0.0)))
    return summed([*lines, *sent(collectives, predicted.communication_s)])


def _compute(model: MeshModel, labels: Labels) -> Iterator[LineTime]:
    liveness = model.analysis.liveness
    launch_s = model.builder.target.device.launch_s
    for node, label in zip(model.graph.nodes, labels.tolist(), strict=True):
        options = model.options[node.id]
        if node.op is None or not options.compute_s.size:
            continue
        seconds = node.count * float(options.compute_s[label])
        if not seconds:
            continue
        launches = liveness.kernels.launches[node.id] + copied_slices(
            model.graph, liveness, node
        )
        starts_s = min(seconds, node.count * launch_s * launches)
        flops = node.count * float(options.flops[label])
        busy_s = seconds - starts_s
        is_matrix = (
            node.is_matmul
            and _arithmetic_s(model, node, label) * node.count
            >= LIMITS.arithmetic_share * busy_s
        )
        yield LineTime(
            str(node.op.source),
            matrix_s=busy_s if is_matrix else 0.0,
            memory_s=0.0 if is_matrix else busy_s,
            launch_s=starts_s,
            flops=flops,
        )


def _arithmetic_s(model: MeshModel, node: Node, label: int) -> float:
    """Return the seconds of a matmul at the matrix unit's rate, including padding."""
    op, options, target = node.op, model.options[node.id], model.builder.target
    assert op is not None and op.rule is not None
    dtype = model.graph.program.values[op.operands[0]].dtype
    strategy = options.strategies[label]
    padding = float(np.ravel(model.builder.array_paddings(op.rule, (strategy,)))[0])
    rate = target.peak_flops_per_s(dtype) * target.device.matmul_efficiency
    return padding * float(options.flops[label]) / rate
