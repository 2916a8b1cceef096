"""The passes from a program to its plan, in the order in which they run.

    trace     function            → program      frontend
    inline    program             → graph        regions entered in place
    analyse   graph               → analysis     facts on every mesh
    price     analysis, mesh      → model        options, and their costs
    fold      model               → problem      repeated nodes share a choice
    recipes   problem             → problem      with the experts' choices in it
    solve     problem             → solution     one option per node
    read back solution            → plan         specs, predictions, reasons

Each is an object, so that its result can be inspected: `Watch` is called after every
pass with the form that it returned, like hooks on passes of xDSL and reductions of
cvxpy. Where no mesh is given, `price` to `solve` run for every candidate mesh.

Their results as text (`dump=`) are one node, option or value per line: nodes are `n0`,
`n1`, …, values `%0`, `%1`, … as in the text of a program. The same program, mesh and
request give the same text on every host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.errors import RhinoError
from rhino_jax.frontend.trace import trace_call
from rhino_jax.ir.printer import format_type
from rhino_jax.ir.spec import Spec, format_spec
from rhino_jax.model.build import MeshModel, build_model
from rhino_jax.model.strategies import Strategy
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.search.folding import fold, solve_on_mesh, with_recipes
from rhino_jax.planner.search.read_back.assemble import assemble
from rhino_jax.planner.search.records import MeshProblem, SolvedMesh, Watch
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


P = ParamSpec("P")
Form = TypeVar("Form")

_SPENT: ContextVar[dict[str, float] | None] = ContextVar(
    "seconds of passes", default=None
)


@contextmanager
def measured_passes() -> Iterator[Mapping[str, float]]:
    """Yield pass → CPU seconds of this process, for all passes that run
    within; those of a pass that another one runs count for it alone."""
    spent = dict[str, float]()
    token = _SPENT.set(spent)
    try:
        yield spent
    finally:
        _SPENT.reset(token)


@dataclass(frozen=True, slots=True)
class Pass(Generic[P, Form]):
    """A step from a program to its plan.

    Attributes:
      name: a word or two.
      apply: computes the output form from the input form.
      text: prints the output form; the same on every host.
    """

    name: str
    apply: Callable[P, Form]
    text: Callable[[Form], str]

    def run(self, watch: Watch | None, *args: P.args, **kwargs: P.kwargs) -> Form:
        """Apply the pass, and show its result to `watch`."""
        spent = _SPENT.get()
        started, inner_s = time.process_time(), sum((spent or {}).values())
        form = self.apply(*args, **kwargs)
        if spent is not None:
            took_s = time.process_time() - started - (sum(spent.values()) - inner_s)
            spent[self.name] = spent.get(self.name, 0.0) + took_s
        if watch is not None:
            watch(self, form)
        return form


TRACE = Pass("trace", trace_call, lambda t: str(t.program))
INLINE = Pass("inline", inline_regions, graph_text)
ANALYSE = Pass("analyse", ProgramAnalysis.of_graph, analysis_text)
PRICE = Pass("price", build_model, model_text)
FOLD = Pass("fold", fold, folded_text)
RECIPES = Pass("recipes", with_recipes, recipes_text)
SOLVE = Pass("solve", solve_on_mesh, solution_text)
READ_BACK = Pass("read back", assemble, plan_text)

PASSES = (TRACE, INLINE, ANALYSE, PRICE, FOLD, RECIPES, SOLVE, READ_BACK)
"""All passes, in the order in which they run."""


class Dump:
    """Write the result of each pass to a file of its own, such as `03_price.txt`.

    Files are numbered in the order in which the passes ran. Those of an earlier run are
    overwritten where they have the same name, and nothing else is touched.

    Attributes:
      folder: the folder of the files; created if missing, but not its parents.
    """

    def __init__(self, folder: str | os.PathLike[str], what: str) -> None:
        """Create the folder.

        Args:
          folder: path of the folder.
          what: the public call, for messages.
        Raises:
          RhinoError: the folder cannot be created.
        """
        self.folder = Path(folder)
        self._what = what
        self._count = 0
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise self._failed(self.folder, error) from error

    def __call__(self, step: Pass[..., Any], form: Any) -> None:
        path = self.folder / f"{self._count:02}_{step.name.replace(' ', '_')}.txt"
        self._count += 1
        try:
            path.write_text(step.text(form) + "\n", encoding="utf-8")
        except OSError as error:
            raise self._failed(path, error) from error

    def _failed(self, path: Path, error: OSError) -> RhinoError:
        return RhinoError(
            f"{self._what}: what the passes give cannot be written.",
            where="dump=",
            numbers=f"{path}: {error.strerror}",
            fix="give a folder that can be written to.",
        )
