"""The compute of a choice by the user's lines, what bounds it, and its course: the
timeline of compute and of live memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from rhino_jax.analysis.equivalence import copied_slices
from rhino_jax.analysis.graph import Node, NodeKind
from rhino_jax.ir.program import Program
from rhino_jax.model.build import MeshModel
from rhino_jax.plan.lines import sent, summed
from rhino_jax.plan.records import (
    Collective,
    LineSpan,
    LineTime,
    LoopSpan,
    Predicted,
    Timeline,
)
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


def timeline(
    model: MeshModel, labels: Labels, collectives: Sequence[Collective]
) -> Timeline:
    """Return the compute and the live memory of a choice in program order.

    A span ends where the source line does, and after an op with a collective.
    """
    program, profile = model.graph.program, model.problem.profile(labels)
    sends = {found for c in collectives if (found := c.op_id) is not None}
    groups: list[list[Node]] = []
    for node in model.graph.nodes:
        if node.kind is not NodeKind.OP or node.op is None:
            continue
        before, source = groups[-1][-1].op if groups else None, node.op.source
        if (
            before is None
            or before.id in sends
            or before.source.is_backward != source.is_backward
            or str(before.source) != str(source)
        ):
            groups.append([])
        groups[-1].append(node)
    starts = [0, *(group[0].time for group in groups[1:]), profile.size]
    spans = [
        _span(model, labels, group, profile[start : max(stop, start + 1)])
        for group, start, stop in zip(groups, starts, starts[1:], strict=False)
    ]
    return Timeline(tuple(spans), tuple(_loops(program)))


def _span(
    model: MeshModel, labels: Labels, nodes: Sequence[Node], live: np.ndarray
) -> LineSpan:
    """Return the span of consecutive nodes, and of the memory while they run."""
    seconds = flops = 0.0
    for node in nodes:
        options, label = model.options[node.id], labels[node.id]
        if options.compute_s.size:
            seconds += node.count * float(options.compute_s[label])
            flops += node.count * float(options.flops[label])
    first, last = nodes[0].op, nodes[-1].op
    assert first is not None and last is not None
    return LineSpan(
        str(first.source),
        first.source.is_backward,
        first.id,
        last.id,
        seconds,
        flops,
        math.ceil(live.max(initial=0.0)),
    )


def _loops(program: Program) -> Iterator[LoopSpan]:
    """Yield the loops of more than one trip, each before those inside."""
    for op in program.ops:
        if op.call is not None and op.call.trip_count > 1:
            inside = [i for region in op.call.regions for i in region.ops]
            if inside:
                last = _last_inside(program, inside[-1])
                yield LoopSpan(str(op.source), op.call.trip_count, inside[0], last)


def _last_inside(program: Program, op_id: int) -> int:
    """Return the id of the last op that runs within an op."""
    call = program.ops[op_id].call
    inside = [i for region in call.regions for i in region.ops] if call else []
    return _last_inside(program, inside[-1]) if inside else op_id
