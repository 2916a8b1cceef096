"""The result of a search, before a plan is read back from it, and solutions carried
over to another problem: that of a program that is nearly the same, or that of the same
program with other pins, which is then solved again.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.hardware.target import Target
from rhino_jax.model.build import MeshModel
from rhino_jax.model.options import Options
from rhino_jax.model.strategies import Strategy
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Predicted
from rhino_jax.planner.search.folding import chosen
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.passes import READ_BACK, SOLVE
from rhino_jax.planner.search.read_back.assemble import decisions_by, recipes_of
from rhino_jax.planner.search.records import MeshProblem, Request, SolvedMesh
from rhino_jax.solver.incumbents import EFFORTS
from rhino_jax.solver.problem import Labels, Problem
from rhino_jax.utils.gc import no_garbage_collection


@dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """The result of a search, from which a plan can be read back.

    Attributes:
      solved: the searched meshes, the best first.
      compared: where there are several meshes, shapes and objectives of those searched.
      notes: on meshes and recipes left out.
      target, request: see `find`.
      started: `time.monotonic()` when the search began.
      brief: the result of level "fast" on the best mesh, with which results of other
        brief searches compare; None where there is none.
    """

    solved: list[SolvedMesh]
    compared: tuple[tuple[tuple[int, ...], float], ...]
    notes: Sequence[str]
    target: Target
    request: Request
    started: float
    brief: SolvedMesh | None = None

    @property
    def best(self) -> SolvedMesh:
        """The best mesh, searched."""
        return self.solved[0]

    @property
    def fits(self) -> bool:
        """Whether a plan fits the memory budget on the best mesh."""
        return self.best.solution.labels is not None

    @property
    def step_s(self) -> float:
        """Predicted step of the best mesh in seconds; infinite where nothing fits."""
        return self.best.solution.objective if self.fits else math.inf

    @property
    def at_fast(self) -> SearchResult:
        """The result at level "fast", of which the requested level is no worse; this
        one where only the requested level finds a plan that fits."""
        is_alone = self.fits and (
            self.brief is None or self.brief.solution.labels is None
        )
        if self.brief is None or is_alone:
            return self
        return replace(self, solved=[self.brief, *self.solved[1:]])

    @property
    def stack_copies_s(self) -> float:
        """Seconds of copies into and out of stacks of loops; a plan must fit."""
        kinds, nodes = (NodeKind.SLICE, NodeKind.STACK), self.best.model.graph.nodes
        return sum(self.best.compute_s(node) for node in nodes if node.kind in kinds)

    @property
    def is_bound_by_memory(self) -> bool:
        """Whether another choice would be cheaper, or fit, with more memory."""
        return not self.fits or self.best.solution.dual is not None

    @property
    def is_too_slow(self) -> bool:
        """Whether every plan on the best few meshes is proved to take longer than the
        request's cutoff, memory left aside."""
        least_s = min(found.solution.bound for found in self.solved)
        return least_s > self.request.cutoff_s

    @property
    def mesh_axes(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of the best mesh's axes."""
        return self.meshes[0]

    @property
    def meshes(self) -> list[tuple[tuple[str, int], ...]]:
        """Axes of the best few meshes, as `mesh_axes`, the best first."""
        meshes = (found.model.mesh for found in self.solved)
        return [tuple((a.name, a.size) for a in mesh.axes) for mesh in meshes]

    def is_same_choice(self, other: SearchResult) -> bool:
        """Whether another result of the same search has the same plan."""
        both = self.fits and other.fits
        return both and np.array_equal(self.best.labels, other.best.labels)

    def decisions(self) -> Decisions:
        """Return the specs of the plan, where there is one."""
        return decisions_by(self.best, self.request)

    def recipes(self) -> dict[str, Predicted | None]:
        """Return the predictions for the recipes that the program allows."""
        return recipes_of(self.best.mesh_problem)

    def plan(self) -> PlanData:
        """Read the plan of the best mesh back.

        Raises:
          InfeasiblePlanError: nothing fits; says what conflicts and what would help.
        """
        plan = READ_BACK.run(
            self.request.watch,
            self.target,
            self.request,
            self.best,
            self.started,
            self.compared,
        )
        return replace(plan, notes=(*plan.notes, *self.notes))


def carried(solved: SolvedMesh, mesh_problem: MeshProblem) -> Labels | None:
    """Map a solution to the problem of another program on the same mesh that has most
    of the same source lines: one with another number of micro-batches, say, or with a
    loop split in two.

    The nth node of a source line takes the strategy of the nth node of that line. A
    node that cannot, or that has no counterpart, takes its cheapest strategy on its
    own: the choice is only a start for the search.

    Args:
      solved: the solution of the other program.
      mesh_problem: the problem, on the same mesh.
    Returns:
      The labels of all nodes; None where the other program has no solution.
    """
    if solved.solution.labels is None:
        return None
    before = solved.model.graph
    known: dict[Hashable, list[Strategy]] = defaultdict(list)
    for node in before.nodes:
        known[_line(before, node)].append(solved.strategy(node.id))
    model = mesh_problem.model
    met: dict[Hashable, int] = defaultdict(int)
    found = np.zeros(len(model.graph.nodes), dtype=np.int64)
    place_of = cache(_place_of)  # Nodes with equal options share one object.
    for node in model.graph.nodes:
        line, options = _line(model.graph, node), model.options[node.id]
        place = place_of(options)
        like = known.get(line, [])
        at = min(met[line], len(like) - 1)
        met[line] += 1
        label = place.get(like[at]) if like else None
        found[node.id] = np.argmin(options.cost_s) if label is None else label
    return found


def _place_of(options: Options) -> dict[Strategy, int]:
    """Return strategy → its position among the options of a node."""
    return {s: k for k, s in enumerate(options.strategies)}


def _line(graph: Graph, node: Node) -> Hashable:
    """Return a key of a node that does not depend on the sizes of its values: the op
    and its source line, or for other nodes those of the nearest op."""
    rank = graph.program.values[node.value].rank
    near = node
    if node.kind is not NodeKind.OP:
        after = (graph.nodes[e.target] for e in graph.outgoing[node.id])
        before = (graph.nodes[e.source.node] for e in graph.incoming[node.id])
        ops = (n for side in (after, before) for n in side if n.kind is NodeKind.OP)
        near = next(ops, node)
    op = near.op
    return node.kind, rank, None if op is None else (op.name, op.source)


@no_garbage_collection()
def search_held(found: SearchResult, request: Request) -> SearchResult:
    """Solve the best mesh of a result with other pins or another budget.

    The program is not analysed again, and the search starts from the known solution.
    Recipes are not searched.

    Args:
      found: a result of the same program.
      request: its pins replace those of the result.
    Raises:
      PinError: an op cannot produce what is pinned.
    """
    started = time.monotonic()
    request = request.begun(started)
    best = found.best
    before = best.model
    mesh_problem = build_mesh_problem(before.analysis, found.mesh_axes, request)
    starts: list[Labels] = []
    known = best.solution.labels
    if known is not None:
        starts = [carried_over(before, mesh_problem.model, known)]
    solved = SOLVE.run(
        request.watch,
        mesh_problem,
        EFFORTS[request.level],
        request,
        starts,
    )
    return replace(
        found, solved=[solved], compared=(), request=request, started=started
    )


@no_garbage_collection()
def repriced(found: SearchResult, request: Request) -> SearchResult | None:
    """Return the best mesh's result with the costs of another request, as with other
    corrections: its choices and those of recipes stay, and its gap.

    Args:
      found: a result of the same program.
      request: must have the same pins.
    Returns:
      The result; None where the options differ, as they may on a mesh of many axes, of
        which not all are enumerated.
    """
    best = found.best
    old, solution = best.mesh_problem, best.solution
    new = build_mesh_problem(old.model.analysis, found.mesh_axes, request)
    recipes = {
        name: None if known is None else carried_over(old.model, new.model, known)
        for name, known in old.recipes.items()
    }
    new = replace(new, recipes=recipes)
    labels = carried_over(old.model, new.model, best.labels)
    solved = chosen(replace(best, mesh_problem=new), labels)
    if any(best.strategy(n) != solved.strategy(n) for n in range(len(labels))):
        return None
    bound = solution.bound / solution.objective * solved.solution.objective
    solved = replace(solved, solution=replace(solved.solution, bound=bound))
    return replace(found, solved=[solved], request=request, brief=None)


def carried_over(before: MeshModel, after: MeshModel, labels: Labels) -> Labels:
    """Map labels of one model to another of the same program and mesh: each node keeps
    its strategy where it exists, and else takes the cheapest one given the others."""
    chosen = np.zeros(len(labels), dtype=np.int64)
    place_of = cache(_place_of)  # Nodes with equal options share one object.
    lost: list[int] = []
    for n, label in enumerate(labels.tolist()):
        old, new = before.options[n], after.options[n]
        if old.strategies is new.strategies:
            chosen[n] = label
            continue
        kept = place_of(new).get(old.strategies[label])
        if kept is None:
            lost.append(n)
        else:
            chosen[n] = kept
    if not lost:
        return chosen
    for n, costs in costs_given(after.problem, chosen, lost).items():
        chosen[n] = int(costs.argmin())
    return chosen


def costs_given(
    problem: Problem, labels: Labels, nodes: Iterable[int]
) -> dict[int, np.ndarray]:
    """Return node → the cost of each of its options, with the labels of all others."""
    costs = {n: problem.costs[n].astype(float) for n in nodes}
    for source, target, table in problem.edges:
        if source in costs:
            costs[source] = costs[source] + table[:, labels[target]]
        if target in costs:
            costs[target] = costs[target] + table[labels[source], :]
    return costs
