"""Specs of all values, predictions and memory of a solution; its compute by the user's
lines, what bounds it, and its course: the timeline of compute and of live memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rhino_jax.analysis.equivalence import copied_slices
from rhino_jax.analysis.graph import Node, NodeKind
from rhino_jax.cost.combine import combine_route
from rhino_jax.hardware.lowering import LoweringPolicy
from rhino_jax.ir.printer import format_type
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.spec import Spec, format_spec, local_shape, replicated
from rhino_jax.model.build import MeshModel
from rhino_jax.model.strategies import Strategy
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.lines import sent, summed
from rhino_jax.plan.records import (
    Collective,
    LineSpan,
    LineTime,
    LoopSpan,
    PeakValue,
    Predicted,
    Timeline,
)
from rhino_jax.planner.search.read_back.traffic import (
    ChoiceTraffic,
    name_of,
    read_backward,
)
from rhino_jax.planner.search.records import LIMITS, SolvedMesh
from rhino_jax.solver.overlap import Overlap, Wait
from rhino_jax.solver.problem import Labels


def decisions_of(found: SolvedMesh) -> Decisions:
    """Return the specs of all values and uses under a choice."""
    graph, lowering = found.model.graph, found.model.mesh.lowering
    program = graph.program
    chosen = [found.strategy(node.id) for node in graph.nodes]
    values = {v: chosen[p.node].results[p.result] for v, p in graph.held.items()}
    operands: dict[tuple[int, int], Spec] = {}
    through: dict[tuple[int, int], tuple[Spec, ...]] = {}
    region_outputs: dict[tuple[int, int, int], Spec] = {}
    outputs = [
        values.get(o.value, replicated(program.values[o.value].rank))
        for o in program.outputs
    ]
    for edge in graph.edges:
        wanted = chosen[edge.target].operands[edge.operand]
        site, is_new = edge.site, wanted != values[edge.value]
        reader = graph.nodes[edge.target]
        if reader.kind is NodeKind.OP:
            if is_new:
                assert reader.op is not None
                at = reader.op.id, edge.operand
                operands[at] = wanted
                # Shared copies that the op reads through.
                copies: list[Spec] = []
                while (node := graph.nodes[edge.source.node]).kind is NodeKind.COPY:
                    copies.insert(0, chosen[node.id].results[0])
                    (edge,) = graph.incoming[node.id]
                befores = chosen[node.id].results[edge.source.result], *copies
                pairs = zip(copies, befores, strict=False)
                if new := tuple(s for s, before in pairs if s != before):
                    through[at] = new
        elif site is None:
            continue
        elif site.kind == "output":
            outputs[site.key[0]] = wanted
        elif is_new and site.kind == "operand":
            operands[site.key[0], site.key[1]] = wanted
        elif is_new and site.kind == "region":
            region_outputs[site.key[0], site.key[1], site.key[2]] = wanted
    # Partial sums pass through these to their own specs.
    waypoints: dict[int, tuple[Spec, ...]] = {}
    for node, strategy in zip(graph.nodes, chosen, strict=True):
        if node.op is not None:
            waypoints |= waypoints_of(node.op, strategy, lowering)
    return Decisions(
        values,
        operands,
        region_outputs,
        tuple(outputs),
        waypoints=waypoints,
        through=through,
        lowering=lowering.routes,
    )


def waypoints_of(
    op: Op, strategy: Strategy, lowering: LoweringPolicy
) -> dict[int, tuple[Spec, ...]]:
    """Return the specs that an op's results pass through from partial sums to their own
    specs, by value.

    Args:
      op: the op.
      strategy: its strategy.
      lowering: the compiler's lowering policy.
    """
    if not strategy.partial:
        return {}
    ends = zip(op.results, strategy.made, strategy.results, strict=True)
    return {
        value: route
        for value, made, done in ends
        if (route := combine_route(made, done, lowering, op.traits.kind))
    }


def overlap_of(model: MeshModel) -> Overlap:
    """Return the problem with the share of its collectives that the target can hide."""
    device, slack = model.builder.target.device, model.analysis.slack
    if device.awaits_sums:
        slack = replace(slack, nodes=(Wait.NONE,) * len(slack.nodes))
    hidable, free = device.hidable_share, device.free_share
    return Overlap.of(
        model.problem,
        model.compute_costs(),
        slack,
        share=device.overlap_share,
        shares={
            Wait.BACK: hidable,
            Wait.LATER: hidable,
            Wait.FREE: hidable if free is None else free,
        },
    )


def predicted_of(overlap: Overlap, traffic: ChoiceTraffic, labels: Labels) -> Predicted:
    """Return time, memory and arithmetic of a choice per device; labels are of all
    nodes, or of orbits where overlap and traffic are folded."""
    step_time_s = overlap.step_s(labels)
    exposed_s = traffic.seconds(labels) - overlap.hidden_s(labels)
    communication_s = max(exposed_s, 0.0)
    return Predicted(
        step_time_s=step_time_s,
        compute_s=max(step_time_s - communication_s, 0.0),
        communication_s=communication_s,
        peak_bytes=math.ceil(overlap.problem.peak(labels)),
        flops_per_device=traffic.flops(labels),
        slack_s=overlap.slack_s(labels),
    )


def live_at(found: SolvedMesh, time: int, most: int = 50) -> tuple[PeakValue, ...]:
    """Return the largest values that are live at a time, at most `most`.

    Values of the same name, line and scopes are one row, as `24 × tanh f32[8,128]`.
    """
    model, labels = found.model, found.labels
    problem, graph = model.problem, model.graph
    saved = read_backward(graph)
    held: dict[tuple[str, ...], list[float]] = defaultdict(list)

    def add(at: Node, amount: float, of: Node, spec: Spec | None, what: str) -> None:
        """Add an amount of a node's value, or of a copy of it for a reader."""
        name = what + name_of(graph, of.ports[0], saved)
        held[name, *_place(model, at), *_shard(model, of, spec)].append(amount)

    for usage in [u for u in problem.node_usages if u.start <= time < u.stop]:
        node, amount = graph.nodes[usage.node], usage.usage[labels[usage.node]]
        spec = found.strategy(node.id).results[node.ports[0].result]
        add(node, float(amount), node, spec, "")
    for pair in [u for u in problem.edge_usages if u.start <= time < u.stop]:
        amount = pair.usage[labels[pair.source], labels[pair.target]]
        reads = found.strategy(pair.target).operands
        ends = (e for e in graph.incoming[pair.target] if e.source.node == pair.source)
        read = next((reads[edge.operand] for edge in ends), None)
        source = graph.nodes[pair.source]
        add(graph.nodes[pair.target], float(amount), source, read, "resharded ")
    largest = sorted(held.items(), key=lambda item: (-sum(item[1]), item[0]))
    return tuple(
        PeakValue(
            what if count < 2 else f"{count} × {what}",
            math.ceil(sum(amounts)),
            *about,
        )
        for (what, *about), amounts in largest[:most]
        for count in [sum(amount > 0 for amount in amounts)]
        if sum(amounts) > 0
    )


def _shard(model: MeshModel, node: Node, spec: Spec | None) -> tuple[str, str]:
    """Return the type of a device's shard of a node's value, and its spec, as text."""
    value = model.graph.program.values[node.value]
    if spec is None or len(spec) != value.rank:
        return "", ""
    local = local_shape(spec, value.shape, model.mesh.sizes)
    return format_type(replace(value, shape=local)), format_spec(spec, model.mesh.names)


def _place(model: MeshModel, node: Node) -> tuple[str, str]:
    """Return the user's line of a node, and the scopes around it.

    Where nothing names scopes (NNX does not), the argument that the op reads.
    """
    if node.op is None:
        return "", ""
    program, source = model.graph.program, node.op.source
    paths = {i.value: i.path for i in program.inputs}
    reads = [paths[v] for v in node.op.operands if v in paths]
    if source.scopes:
        gradient = "the gradient of " if source.is_backward else ""
        return str(source), f"in {gradient}{source.scopes}"
    return str(source), f"reading {reads[0]}" if reads else ""


def line_times(
    found: SolvedMesh, predicted: Predicted, collectives: Sequence[Collective]
) -> tuple[LineTime, ...]:
    """Return the seconds of a step by line; together they are the predicted step.

    Seconds of compute that belong to no op (copies between layouts on one device) have
    an empty line.
    """
    lines: list[LineTime] = []
    model, target = found.model, found.model.builder.target
    liveness, device = model.analysis.liveness, target.device
    for node in model.graph.nodes:
        if node.op is None or not (seconds := found.compute_s(node)):
            continue
        launches = liveness.kernels.launches[node.id] + copied_slices(
            model.graph, liveness, node
        )
        starts_s = min(seconds, node.count * device.launch_s * launches)
        flops, busy_s, is_matrix = found.flops(node), seconds - starts_s, False
        if node.is_matmul:  # At the matrix unit's rate, including padding.
            strategies = (found.strategy(node.id),)
            padding = np.ravel(model.builder.array_paddings(node.op, strategies))[0]
            dtype = model.graph.program.values[node.op.operands[0]].dtype
            rate = target.peak_flops_per_s(dtype) * device.matmul_efficiency
            matrix_s = float(padding) * flops / rate
            is_matrix = matrix_s >= LIMITS.arithmetic_share * busy_s
        line = LineTime(
            str(node.op.source),
            matrix_s=busy_s if is_matrix else 0.0,
            memory_s=0.0 if is_matrix else busy_s,
            launch_s=starts_s,
            flops=flops,
        )
        lines.append(line)
    rest_s = predicted.compute_s - sum(line.seconds for line in lines)
    lines.append(LineTime("", memory_s=max(rest_s, 0.0)))
    return summed([*lines, *sent(collectives, predicted.communication_s)])


def timeline(found: SolvedMesh, collectives: Sequence[Collective]) -> Timeline:
    """Return the compute and the live memory of a choice in program order.

    A span ends where the source line does, and after an op with a collective.
    """
    graph, profile = found.model.graph, found.model.problem.profile(found.labels)
    sends = {c.op_id for c in collectives}
    groups: list[list[tuple[Op, Node]]] = []
    for node in graph.nodes:
        if node.kind is not NodeKind.OP or node.op is None:
            continue
        before, source = groups[-1][-1][0] if groups else None, node.op.source
        if (
            before is None
            or before.id in sends
            or before.source.is_backward != source.is_backward
            or str(before.source) != str(source)
        ):
            groups.append([])
        groups[-1].append((node.op, node))
    starts = [0, *(group[0][1].time for group in groups[1:]), profile.size]
    spans = [
        LineSpan(
            str(first.source),
            first.source.is_backward,
            first.id,
            group[-1][0].id,
            sum((found.compute_s(node) for _, node in group), 0.0),
            sum((found.flops(node) for _, node in group), 0.0),
            math.ceil(profile[start : max(stop, start + 1)].max(initial=0.0)),
        )
        for group, start, stop in zip(groups, starts, starts[1:], strict=False)
        for first, _ in group[:1]
    ]
    return Timeline(tuple(spans), tuple(_loops(graph.program)))


def _loops(program: Program) -> Iterator[LoopSpan]:
    """Yield the loops of more than one trip, each before those inside."""
    for op in program.ops:
        if op.call is not None and op.call.trip_count > 1:
            _, *inside = (inner.id for inner, _ in program.within(op))
            if inside:
                trips = op.call.trip_count
                yield LoopSpan(str(op.source), trips, inside[0], inside[-1])
