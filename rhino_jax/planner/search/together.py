"""Several programs that share state, searched as one problem on one mesh.

The problem has the nodes of all programs; a shared array is produced by one node, whose
choice all of them read. Costs are weighted by the programs' weights. The programs run
one after the other: each has its own time in memory, during which the state that the
others need later is live as well.

The communication that compute hides is added up over all programs, which overestimates
it where one has collectives to hide and another the compute; the plans made of the
result are costed one by one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.shared import Slot
from rhino_jax.planner.search.adding import Adding, Member, input_nodes
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.recipe_choices import first_choices, with_recipes
from rhino_jax.planner.search.records import MeshProblem
from rhino_jax.recipes.recipes import recipes_for
from rhino_jax.solver.incumbents import RECIPE_EFFORTS, Effort, Report
from rhino_jax.solver.overlap import Overlap
from rhino_jax.solver.problem import Labels
from rhino_jax.solver.solve import solve_overlapped


@dataclass(frozen=True, slots=True)
class SharedSolution:
    """The layout of the inputs that are shared or stay allocated.

    Attributes:
      specs: for each member, input → spec.
      objective_s, bound_s: weighted sum of step times in seconds, and its lower bound.
      smallest_peak_bytes: the smallest peak of all choices visited.
      fits: whether any choice is within the budget.
    """

    specs: tuple[Mapping[int, Spec], ...]
    objective_s: float
    bound_s: float
    smallest_peak_bytes: float
    fits: bool


def search_layout(
    members: Sequence[Member],
    analyses: Sequence[ProgramAnalysis],
    shared: Sequence[Sequence[Slot]],
    mesh_axes: Sequence[tuple[str, int]],
    effort: Effort,
    report: Report = lambda best, bound: None,
    *,
    is_brief: bool = False,
) -> SharedSolution:
    """Return the layout of shared state with the smallest weighted sum of steps.

    Args:
      members: the programs.
      analyses: their analyses.
      shared: for each shared array, its (program, input) slots, at least two.
      mesh_axes: (name, size), major first.
      effort: limits of the search.
      report: called with new best objectives and bounds, in seconds.
      is_brief: start from the recipes' first choices instead of searching the recipes.
    """
    problems = [
        build_mesh_problem(analysis, mesh_axes, member.request)
        for analysis, member in zip(analyses, members, strict=True)
    ]
    if is_brief:
        problems = [replace(p, recipes=_first_recipes(p)) for p in problems]
    else:
        problems = [with_recipes(p, RECIPE_EFFORTS["fast"]) for p in problems]
    joint = Joint.of(members, problems, shared)
    found = solve_overlapped(joint.overlap, joint.starts(), effort, report)
    if found.labels is None:
        nothing: tuple[dict[int, Spec], ...] = ({},) * len(members)
        peak = found.smallest_peak
        return SharedSolution(nothing, math.inf, found.bound, peak, fits=False)
    return SharedSolution(
        tuple(joint.specs_of(m, found.labels) for m in range(len(members))),
        found.objective,
        found.bound,
        found.smallest_peak,
        fits=True,
    )


def _first_recipes(mesh_problem: MeshProblem) -> dict[str, Labels | None]:
    names = [
        r.name
        for r in recipes_for(mesh_problem.model.mesh)
        if mesh_problem.book.allows(r)
    ]
    return dict(zip(names, first_choices(mesh_problem), strict=False))


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """The joint problem of all programs.

    Attributes:
      mesh_problem: the problem of each program.
      told: for each member, the inputs whose specs are returned.
      node: for each member, the joint node of each orbit, [orbits].
      picks: for each member and orbit, its own option of each option of the joint node.
      overlap: the problem with the communication that compute can hide.
    """

    mesh_problem: Sequence[MeshProblem]
    told: Sequence[frozenset[int]]
    node: Sequence[np.ndarray]
    picks: Sequence[Sequence[np.ndarray]]
    overlap: Overlap

    @classmethod
    def of(
        cls,
        members: Sequence[Member],
        mesh_problem: Sequence[MeshProblem],
        shared: Sequence[Sequence[Slot]],
    ) -> Joint:
        """Join the problems of programs that share arrays."""
        node, picks = _join_nodes(mesh_problem, shared)
        overlap = Adding(members, mesh_problem, shared, node, picks).overlap()
        told = [
            members[m].stays | {slot for place in shared for k, slot in place if k == m}
            for m in range(len(members))
        ]
        return cls(mesh_problem, told, node, picks, overlap)

    def labels_of(self, member: int, labels: Labels) -> Labels:
        """Return a member's labels of all of its nodes."""
        own = [
            pick[labels[j]]
            for pick, j in zip(self.picks[member], self.node[member], strict=True)
        ]
        return self.mesh_problem[member].symmetry.expand(np.array(own, dtype=np.int64))

    def specs_of(self, member: int, labels: Labels) -> dict[int, Spec]:
        """Return a member's specs of the inputs that are shared or stay allocated."""
        model, chosen = self.mesh_problem[member].model, self.labels_of(member, labels)
        return {
            slot: model.spec(model.graph.nodes[n].ports[0], int(chosen[n]))
            for slot, n in input_nodes(self.mesh_problem[member]).items()
            if slot in self.told[member]
        }

    def starts(self) -> list[Labels]:
        """Return the recipes that all programs have as joint labels; the first program
        decides the shared arrays."""
        names = [n for n, x in self.mesh_problem[0].recipes.items() if x is not None]
        found = []
        for name in names:
            every = [d.recipes.get(name) for d in self.mesh_problem]
            known = [x for x in every if x is not None]
            if len(known) == len(every):
                found.append(self.join(known))
        return found

    def join(self, labels: Sequence[Labels]) -> Labels:
        """Join the members' own labels; the first member decides the shared arrays."""
        joint = np.zeros(len(self.overlap.problem.costs), dtype=np.int64)
        for member in reversed(range(len(self.mesh_problem))):
            own = self.mesh_problem[member].symmetry.contract(labels[member])
            for c, (pick, j) in enumerate(
                zip(self.picks[member], self.node[member], strict=True)
            ):
                at = np.flatnonzero(pick == own[c])
                if len(at):
                    joint[j] = at[0]
        return joint


def _join_nodes(
    mesh_problem: Sequence[MeshProblem], shared: Sequence[Sequence[Slot]]
) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Return every orbit's joint node, and its own option of every joint option."""
    first = [0, *itertools.accumulate(len(d.symmetry.first) for d in mesh_problem)]
    root = np.arange(first[-1])
    inputs = [input_nodes(d) for d in mesh_problem]
    for place in shared:
        ends = [
            first[m] + int(mesh_problem[m].symmetry.orbits[inputs[m][slot]])
            for m, slot in place
            if slot in inputs[m]
        ]
        same = {int(root[end]) for end in ends}
        if same:
            root[np.isin(root, list(same))] = min(same)
    _, joint = np.unique(root, return_inverse=True)
    node = [joint[a:b] for a, b in itertools.pairwise(first)]
    common: dict[int, list[Spec]] = {}
    sizes = np.bincount(joint)
    for m, d in enumerate(mesh_problem):
        for c, j in enumerate(node[m].tolist()):
            if sizes[j] > 1:
                own = _specs(d, c)
                common[j] = [s for s in common.get(j, own) if s in set(own)]
    picks = []
    for m, d in enumerate(mesh_problem):
        mine = []
        for c, j in enumerate(node[m].tolist()):
            count = len(d.folded.problem.costs[c])
            if j not in common:
                mine.append(np.arange(count))
                continue
            own = _specs(d, c)
            mine.append(np.array([own.index(s) for s in common[j]], dtype=np.int64))
        picks.append(mine)
    return node, picks


def _specs(mesh_problem: MeshProblem, orbit: int) -> list[Spec]:
    """Return the spec of each option of an orbit of inputs."""
    options = mesh_problem.model.options[int(mesh_problem.symmetry.first[orbit])]
    return [s.results[0] for s in options.strategies]
