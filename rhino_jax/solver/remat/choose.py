"""Choice of the cheapest rematerialization that fits."""

from __future__ import annotations

from ortools.sat.python import cp_model

from rhino_jax.solver.remat.model import PER_S, RematModel, num_variables
from rhino_jax.solver.remat.question import SAVE, Question, RematAnswer, evaluate


MAX_VARIABLES = 20_000
"""Largest number of (value, late time) pairs: with more, building the model takes
longer than planning most programs."""


def choose(
    question: Question, budget_bytes: int, *, seconds: float = 30.0, seed: int = 0
) -> RematAnswer | None:
    """Return the cheapest choice that fits; None if there is none.

    Args:
      question: the values; None is returned if they are too many.
      budget_bytes: memory budget at every time.
      seconds: time limit, after which the best choice so far is returned.
      seed: seed of the search.
    """
    all_kept = evaluate(question, (SAVE,) * len(question.candidates))
    is_free = not any(c.save_s for c in question.candidates)
    if all_kept is not None and all_kept.peak_bytes <= budget_bytes and is_free:
        return all_kept
    has_uses = any(c.uses for c in question.candidates)
    if not has_uses or num_variables(question) > MAX_VARIABLES:
        return None
    model = RematModel(question, budget_bytes)
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
    return RematAnswer(found.choices, found.added_s, found.peak_bytes, bound)
