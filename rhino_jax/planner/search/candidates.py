"""Plans whose predicted step time is near the best one's, for the compiler to compare.

The model's errors are mostly in the cost of communication, so in addition to the
recipes the runners-up are the best choices where communication is more and less
expensive than the model says. One recipe is annotated as people do it, around matmuls
only: where annotating every value misleads the compiler, that candidate shows it. And
beyond the requested number, data parallelism, ZeRO-1 and FSDP are always compiled as
most people write them: the chosen plan is then never slower, once compiled, than these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.search.records import LIMITS, MeshProblem, SolvedMesh
from rhino_jax.solver.incumbents import Effort
from rhino_jax.solver.problem import Labels, PairTable
from rhino_jax.solver.solve import solve
from rhino_jax.utils.cache import Memo


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A plan to compile.

    Attributes:
      name: "best", a recipe, "fsdp@matmul" (a recipe that is annotated around matmuls
        only), "fsdp@batch" (one whose parameters, optimizer state and batch alone are
        annotated), "less communication", "more communication", or "best on 2x4"
        (another mesh).
      plan: the plan.
    """

    name: str
    plan: PlanData


def candidates_of(
    found: Sequence[SolvedMesh], around_matmuls: MeshProblem, effort: Effort, count: int
) -> list[tuple[str, SolvedMesh]]:
    """Return the distinct choices with the shortest predicted steps, at most `count`.

    The best choice is first. The best recipe, annotated around matmuls only, follows
    wherever it fits, then the others by their predicted step.

    Args:
      found: the searched meshes, best first; there is a plan for the first.
      around_matmuls: the first mesh, with costs of programs that are annotated around
        matmuls only.
      effort: search effort for runners-up.
      count: maximum number of choices.
    """
    best = found[0]
    annotated = [
        (f"{name}@matmul", one)
        for name, one in _recipes(replace(best, mesh_problem=around_matmuls))
    ]
    annotated.sort(key=_predicted_s)
    # The best choices where communication costs more, and less.
    symmetry, folded = best.mesh_problem.symmetry, best.mesh_problem.folded
    others = []
    for weight in LIMITS.communication_weights:
        problem, memo = folded.problem, Memo()
        costs = [
            compute + weight * (total - compute)
            for total, compute in zip(problem.costs, folded.compute.costs, strict=True)
        ]
        edges = [
            PairTable(e.source, e.target, memo.scaled(e.table, weight))
            for e in problem.edges
        ]
        problem = replace(problem, costs=costs, edges=edges)
        labels = solve(problem, [symmetry.contract(best.labels)], effort).labels
        if labels is None:
            continue  # It fits only if repeated nodes choose differently.
        name = "less communication" if weight > 1 else "more communication"
        others.append((name, chosen(best, symmetry.expand(labels))))
    others += [
        *((f"best on {_shape(f)}", f) for f in found[1:]),
        *_recipes(best),
    ]
    ranked = [("best", best), *annotated[:1], *sorted(others, key=_predicted_s)]
    kept: list[tuple[str, SolvedMesh]] = []
    for name, one in ranked:
        if one.solution.labels is not None and not any(
            _is_same(one, other) for _, other in kept
        ):
            kept.append((name, one))
    return kept[:count]


def plain_of(
    best: SolvedMesh, plain: MeshProblem
) -> tuple[list[tuple[str, SolvedMesh]], list[str]]:
    """Return the recipes, as mostly annotated, that may be faster once compiled.

    Args:
      best: the best solution.
      plain: its mesh, with plain recipes of density "batch".
    Returns:
      Recipes that fit and whose predicted step is within `LIMITS.prediction_error` of
        the best plan's, and notes on the others.
    """
    kept: list[tuple[str, SolvedMesh]] = []
    left_out: list[str] = []
    limit = (1 + LIMITS.prediction_error) * best.solution.objective
    named = [
        (f"{n}@batch", one) for n, one in _recipes(replace(best, mesh_problem=plain))
    ]
    for name, one in sorted(named, key=_predicted_s):
        predicted = one.solution.objective
        if any(_is_same(one, other) for _, other in kept):
            continue
        if predicted > limit:
            slower = predicted / best.solution.objective
            left_out.append(f"{name} ({slower:.3g} times the plan)")
        else:
            kept.append((name, one))
    if not left_out:
        return kept, []
    error = f"{LIMITS.prediction_error:.0%}"
    note = (
        "recipes that were not compiled, since what they promise is slower by more than"
        f" the error of prediction, {error}: {', '.join(left_out)}."
    )
    return kept, [note]


def _predicted_s(candidate: tuple[str, SolvedMesh]) -> float:
    return candidate[1].solution.objective


def _is_same(one: SolvedMesh, other: SolvedMesh) -> bool:
    a, b = one.solution.labels, other.solution.labels
    if a is None or b is None or one.mesh_problem is not other.mesh_problem:
        return False
    return bool((a == b).all())


def _shape(found: SolvedMesh) -> str:
    return "x".join(str(a.size) for a in found.model.mesh.axes)


def _recipes(found: SolvedMesh) -> list[tuple[str, SolvedMesh]]:
    """Return the recipes that fit."""
    return [
        (name, chosen(found, labels))
        for name, labels in found.mesh_problem.recipes.items()
        if labels is not None and _fits(found, labels)
    ]


def _fits(found: SolvedMesh, labels: Labels) -> bool:
    problem = found.model.problem
    return problem.peak(labels) <= problem.limit


def chosen(found: SolvedMesh, labels: Labels) -> SolvedMesh:
    """Return another choice in the same model, under the same bound."""
    overlap = found.mesh_problem.overlap
    peak = overlap.problem.peak(labels)
    solution = replace(
        found.solution, labels=labels, objective=overlap.step_s(labels), peak=peak
    )
    return replace(found, solution=solution)
