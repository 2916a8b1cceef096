"""The results of the passes as text: one node, option or value per line.

Nodes are `n0`, `n1`, …, values `%0`, `%1`, … as in the text of a program. The same
program, mesh and request give the same text on every host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.ir.printer import format_type
from rhino_jax.ir.spec import Spec, format_spec
from rhino_jax.model.build import MeshModel
from rhino_jax.model.strategies import Strategy
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.search.records import MeshProblem, SolvedMesh
from rhino_jax.solver.overlap import Wait
from rhino_jax.units import format_bytes, format_seconds


def graph_text(graph: Graph) -> str:
    """Print the nodes in the order in which they run, and the nodes that each reads."""
    lines = ["graph"]
    for node in graph.run_order:
        reads = " ".join(f"n{edge.source.node}" for edge in graph.incoming[node.id])
        parts = [_name(node) + f": {format_type(graph.program.values[node.value])}"]
        if reads:
            parts.append(f"reads {reads}")
        if node.count != 1:
            parts.append(f"{node.count} times")
        if node.op is not None:
            parts.append(f"# {node.op.source}")
        lines.append("  " + "  ".join(parts))
    return "\n".join(lines)


def analysis_text(analysis: ProgramAnalysis) -> str:
    """Print the facts of every node that hold on any mesh: the dim classes of its
    results, and what waits for its collectives."""
    graph = analysis.graph
    lines = ["analysis"]
    for node in graph.run_order:
        dim_classes = " ".join(
            "(" + " ".join(f"d{c}" for c in analysis.dim_classes.results(node, r)) + ")"
            for r in range(len(node.ports))
        )
        wait = Wait(analysis.slack.nodes[node.id]).name.lower()
        lines.append(f"  {_name(node)}  dims {dim_classes}  waited for: {wait}")
    return "\n".join(lines)


def model_text(model: MeshModel) -> str:
    """Print every node's options with their seconds, and the size of every edge."""
    mesh, graph = model.mesh, model.graph
    axes = " × ".join(f"{a.name}={a.size}" for a in mesh.axes)
    limit = format_bytes(model.problem.limit)
    lines = [f"model  {axes}  at most {limit} per device"]
    for node in graph.run_order:
        lines.append(f"  {_name(node)}")
        options, costs = model.options[node.id], model.problem.costs[node.id]
        for k, strategy in enumerate(options.strategies):
            cost = format_seconds(float(costs[k]))
            lines.append(f"    {k}  {strategy_text(strategy, mesh.names)}  {cost}")
    for edge in model.problem.edges:
        rows, columns = edge.table.shape
        worst = format_seconds(float(edge.table.max(initial=0.0)))
        lines.append(
            f"  n{edge.source} → n{edge.target}  {rows} × {columns}  at most {worst}"
        )
    return "\n".join(lines)


def folded_text(mesh_problem: MeshProblem) -> str:
    """Print which nodes are one orbit, and the size of the folded problem."""
    symmetry, problem = mesh_problem.symmetry, mesh_problem.folded.problem
    members: dict[int, list[int]] = {}
    for node, orbit in enumerate(symmetry.orbits.tolist()):
        members.setdefault(orbit, []).append(node)
    nodes, edges = len(symmetry.orbits), len(mesh_problem.model.problem.edges)
    lines = [
        f"folded  {nodes} nodes to {len(problem.costs)},"
        f" {edges} edges to {len(problem.edges)}"
    ]
    for orbit, every in members.items():
        options = len(problem.costs[orbit])
        nodes_text = " ".join(f"n{n}" for n in every)
        lines.append(f"  {orbit}  {options} options  {nodes_text}")
    return "\n".join(lines)


def recipes_text(mesh_problem: MeshProblem) -> str:
    """Print the seconds of every recipe at its best."""
    lines = ["recipes"]
    for name, labels in mesh_problem.recipes.items():
        what = "the program has nothing that it could cut"
        if labels is not None:
            what = format_seconds(mesh_problem.overlap.step_s(labels))
        lines.append(f"  {name}  {what}")
    return "\n".join(lines)


def solution_text(found: SolvedMesh) -> str:
    """Print the option that every node takes, with its cost."""
    model, solution = found.model, found.solution
    lines = [
        f"solution  {format_seconds(solution.objective)}"
        f"  at least {format_seconds(solution.bound)}"
        f"  peak {format_bytes(solution.peak)}"
    ]
    if solution.labels is None:
        return "\n".join([*lines, "  nothing fits"])
    for node in model.graph.run_order:
        label = int(solution.labels[node.id])
        strategy = model.options[node.id].strategies[label]
        cost = format_seconds(float(model.problem.costs[node.id][label]))
        text = strategy_text(strategy, model.mesh.names)
        lines.append(f"  {_name(node)}  {label}  {text}  {cost}")
    return "\n".join(lines)


def plan_text(plan: PlanData) -> str:
    """Print the spec of every value, and the reads and outputs with another spec."""
    names, decisions = [name for name, _ in plan.mesh_axes], plan.decisions
    lines = [f"plan  {format_seconds(plan.predicted.step_time_s)}"]
    for value, spec in sorted(decisions.values.items()):
        over = [format_spec(s, names) for s in decisions.waypoints.get(value, ())]
        passing = f"  over {' '.join(over)}" if over else ""
        lines.append(f"  %{value}  {format_spec(spec, names)}{passing}")
    for (op, operand), spec in sorted(decisions.operands.items()):
        over = [format_spec(s, names) for s in decisions.through.get((op, operand), ())]
        passing = f"  over {' '.join(over)}" if over else ""
        text = format_spec(spec, names)
        lines.append(f"  op {op} reads operand {operand} as {text}{passing}")
    for (op, region, out), spec in sorted(decisions.region_outputs.items()):
        text = format_spec(spec, names)
        lines.append(f"  op {op} gives output {out} of region {region} as {text}")
    for position, spec in enumerate(decisions.outputs):
        lines.append(f"  output {position}  {format_spec(spec, names)}")
    return "\n".join(lines)


def strategy_text(strategy: Strategy, names: Sequence[str]) -> str:
    """Print a strategy's operand and result specs, as `P('x'), P() -> P('x')`."""
    reads = ", ".join(_specs(strategy.operands, names))
    makes = ", ".join(_specs(strategy.results, names))
    text = f"{reads} -> {makes}" if reads else makes
    if not strategy.partial:
        return text
    axes = ", ".join(names[a] for a in strategy.partial)
    return f"{text}  summed over {axes}"


def _specs(specs: Sequence[Spec], names: Sequence[str]) -> Iterator[str]:
    return (format_spec(spec, names) for spec in specs)


def _name(node: Node) -> str:
    what = node.kind.value
    if node.kind is NodeKind.OP and node.op is not None:
        what = node.op.name
    return f"n{node.id} {what} %{node.value}"
