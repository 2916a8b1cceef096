"""A solution read back: specs of all values, collectives, predictions, memory."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from rhino_jax.cost.collectives import collective_s, wire_bytes
from rhino_jax.cost.combine import combine_route
from rhino_jax.cost.reshard import Step, reshard_steps
from rhino_jax.hardware.mesh import size_of
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.spec import Spec, format_spec, padding_of, replicated
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.records import Collective, Holding, Predicted
from rhino_jax.search.build import Model
from rhino_jax.search.graph import Edge, Node, NodeKind, Port
from rhino_jax.search.options import own_steps
from rhino_jax.search.overlap import Overlap
from rhino_jax.search.problem import Labels


def decisions_of(model: Model, labels: Labels) -> Decisions:
    """The specs of all values and uses under a choice."""
    graph, program = model.graph, model.graph.program
    values = {
        value: model.spec(port, int(labels[port.node]))
        for value, port in graph.held.items()
    }
    operands: dict[tuple[int, int], Spec] = {}
    region_outputs: dict[tuple[int, int, int], Spec] = {}
    outputs = [
        values.get(o.value, replicated(program.values[o.value].rank))
        for o in program.outputs
    ]
    for edge in graph.edges:
        wanted = model.wanted(edge, int(labels[edge.target]))
        for use in edge.uses:
            if use.kind == "output":
                outputs[use.key[0]] = wanted
            elif wanted == values[edge.value]:
                continue
            elif use.kind == "operand":
                operands[use.key[0], use.key[1]] = wanted
            elif use.kind == "region":
                region_outputs[use.key[0], use.key[1], use.key[2]] = wanted
    return Decisions(
        values,
        operands,
        region_outputs,
        tuple(outputs),
        stops=_stops(model, labels),
        gathers_by_axis=model.mesh.gathers_by_axis,
    )


def _stops(model: Model, labels: Labels) -> dict[int, tuple[Spec, ...]]:
    """Where partial sums pass through on the way to how they are held."""
    found: dict[int, tuple[Spec, ...]] = {}
    for node in model.graph.nodes:
        strategy = model.options[node.id].strategies[labels[node.id]]
        if node.op is None or not strategy.partial:
            continue
        for value, made, done in zip(
            node.op.results, strategy.made, strategy.results, strict=True
        ):
            route = combine_route(
                made,
                done,
                model.mesh.scatters_by_axis,
                is_conv=node.op.name == "conv_general_dilated",
            )
            if route:
                found[value] = route
    return found


def collectives_of(model: Model, labels: Labels) -> tuple[Collective, ...]:
    """All collectives of a choice, the most expensive first."""
    graph, mesh = model.graph, model.mesh
    found: list[Collective] = []
    for node in graph.nodes:
        strategy = model.options[node.id].strategies[labels[node.id]]
        for step in own_steps(graph.program, node, strategy, mesh):
            found.append(
                _record(model, step, node.count, node.op, _why_own(model, node, step))
            )
    for edge in graph.edges:
        have = model.spec(edge.source, int(labels[edge.source.node]))
        want = model.wanted(edge, int(labels[edge.target]))
        value = graph.program.values[edge.value]
        padding = 1.0
        if not model.builder.padded_dims.isdisjoint(value.shape):
            padding = max(padding_of(s, value.shape, mesh.sizes) for s in (have, want))
        for step in reshard_steps(
            have,
            want,
            round(value.bytes * padding),
            mesh.sizes,
            by_axis=mesh.gathers_by_axis,
            says_stops=mesh.says_stops,
        ):
            reader = graph.nodes[edge.target]
            maker = graph.nodes[edge.source.node]
            op = reader.op or maker.op
            found.append(
                _record(model, step, edge.count, op, _why_edge(model, edge, have, want))
            )
    return tuple(sorted(found, key=lambda c: (-c.seconds, c.kind, c.op, c.reason)))


def _record(
    model: Model, step: Step, count: int, op: Op | None, reason: str
) -> Collective:
    mesh = model.mesh
    # Named in the mesh's order, as the compiler's are: the order says nothing.
    axes = [mesh.axes[a] for a in sorted(step.axes)]
    per_run = wire_bytes(step.kind, step.local_bytes, size_of(mesh, step.axes))
    return Collective(
        kind=step.kind,
        axes=tuple(a.name for a in axes),
        bytes=round(per_run * count),
        count=count,
        seconds=collective_s(step.kind, step.local_bytes, axes) * count,
        op="" if op is None else f"{op.name} #{op.id}",
        source="" if op is None else str(op.source),
        reason=reason,
    )


def _why_own(model: Model, node: Node, step: Step) -> str:
    op = node.op
    assert op is not None and op.rule is not None
    if step.kind == "collective-permute":
        return "borders of the window"
    strategy_names = [f.name for f in op.rule.factors if f.reducer is not None]
    return f"partial result over {', '.join(strategy_names)}"


def _why_edge(model: Model, edge: Edge, have: Spec, want: Spec) -> str:
    names = model.mesh.names
    what = name_of(model, edge.source)
    return f"{what}: {format_spec(have, names)} → {format_spec(want, names)}"


def name_of(model: Model, port: Port) -> str:
    """What people call the value that a port holds."""
    program, node = model.graph.program, model.graph.nodes[port.node]
    if node.kind is NodeKind.INPUT:
        return program.inputs[node.slot].path
    if node.kind is NodeKind.COPY:
        return f"copy of %{node.value}"
    if node.op is None:
        return f"%{node.value}"
    kind = "" if node.kind is NodeKind.OP else f" {node.kind.value}"
    return f"{node.op.name}{kind} %{node.value}"


def overlap_of(model: Model) -> Overlap:
    """What the target can hide of the model's collectives."""
    target = model.builder.target
    return Overlap.of(
        model.problem,
        model.compute_costs(),
        model.liveness.slack,
        share=target.overlap_share,
        hidable_share=target.hidable_share,
    )


def predicted_of(
    model: Model,
    overlap: Overlap,
    labels: Labels,
    collectives: tuple[Collective, ...],
) -> Predicted:
    """Time, memory and arithmetic of a choice, per device."""
    flops = sum(
        float(options.flops[labels[node.id]]) * node.count
        for node, options in zip(model.graph.nodes, model.options, strict=True)
    )
    step_time_s = overlap.step_s(labels)
    exposed_s = sum(c.seconds for c in collectives) - overlap.hidden_s(labels)
    communication_s = max(exposed_s, 0.0)
    return Predicted(
        step_time_s=step_time_s,
        compute_s=max(step_time_s - communication_s, 0.0),
        communication_s=communication_s,
        peak_bytes=math.ceil(model.problem.peak(labels)),
        flops_per_device=flops,
        slack_s=overlap.slack_s(labels),
    )


def at_peak(model: Model, labels: Labels, most: int = 50) -> tuple[Holding, ...]:
    """What is live at the peak, largest first."""
    problem = model.problem
    time = int(problem.profile(labels).argmax())
    held: dict[tuple[str, str], float] = defaultdict(float)
    for usage in problem.node_usages:
        if usage.start <= time < usage.stop:
            node = model.graph.nodes[usage.node]
            amount = float(usage.usage[labels[usage.node]])
            held[name_of(model, Port(node.id, 0)), _source(node)] += amount
    for pair in problem.edge_usages:
        if pair.start <= time < pair.stop:
            amount = float(pair.usage[labels[pair.source], labels[pair.target]])
            node = model.graph.nodes[pair.target]
            name = f"resharded {name_of(model, Port(pair.source, 0))}"
            held[name, _source(node)] += amount
    largest = sorted(held.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        Holding(what, math.ceil(amount), source)
        for (what, source), amount in largest[:most]
        if amount > 0
    )


def _source(node: Node) -> str:
    return "" if node.op is None else str(node.op.source)


def coverage_shares(program: Program) -> tuple[float, float, float, dict[str, int]]:
    """Shares of ops, FLOPs and result bytes that rules cover, and the unknown."""
    unknown: dict[str, int] = defaultdict(int)
    ops = np.zeros(2)
    flops = np.zeros(2)
    size = np.zeros(2)
    for op, count in program.walk():
        if op.call is not None:
            continue
        k = int(op.is_known)
        ops[k] += 1
        flops[k] += op.flops * count
        size[k] += sum(program.values[r].bytes for r in op.results) * count
        if not op.is_known:
            unknown[op.name] += 1

    def share(pair: np.ndarray) -> float:
        return 1.0 if not pair.sum() else float(pair[1] / pair.sum())

    return share(ops), share(flops), share(size), dict(unknown)
