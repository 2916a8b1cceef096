"""The cheapest choice that fits."""

from __future__ import annotations

from ortools.sat.python import cp_model

from rhino_jax.optimize.keeping.model import PER_S, Model
from rhino_jax.optimize.keeping.question import KEEP, Answer, Question, evaluate


def choose(
    question: Question, budget_bytes: int, *, seconds: float = 30.0, seed: int = 0
) -> Answer | None:
    """The cheapest choice that fits; None where none does.

    Args:
      question: the values.
      budget_bytes: what memory holds at every time.
      seconds: after which the best choice so far will do.
      seed: of the search.
    """
    all_kept = evaluate(question, (KEEP,) * len(question.candidates))
    if all_kept is not None and all_kept.peak_bytes <= budget_bytes:
        return all_kept
    if not any(c.uses for c in question.candidates):
        return None
    model = Model(question, budget_bytes)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found = evaluate(question, model.choices(solver))
    assert found is not None
    bound = solver.best_objective_bound / PER_S
    return Answer(found.choices, found.added_s, found.peak_bytes, bound)
