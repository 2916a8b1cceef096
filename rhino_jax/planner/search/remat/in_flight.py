"""Choice of the activations that a stage saves, recomputes or offloads between its
forward and backward tasks.

A stage holds the saved residuals of every micro-batch in flight, the recomputed values
of one, and the offloaded values of those in transfer.
"""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.planner.search.limits import LIMITS
from rhino_jax.planner.search.records import SolvedMesh
from rhino_jax.planner.search.remat.choice import SOME, Chosen, choice_of
from rhino_jax.planner.search.remat.policies import of_all
from rhino_jax.planner.search.remat.tasks import AskingTasks, Tasks
from rhino_jax.solver.remat.model import choose
from rhino_jax.solver.remat.question import (
    OFFLOAD,
    REMAT,
    SAVE,
    Question,
    RematAnswer,
    coarse,
    evaluate,
)


MUCH_BYTES = 1 << 60
"""A memory budget that is no limit."""


def choices_in_flight(
    solved: SolvedMesh, tasks: Tasks, less_bytes: int, *, seconds: float
) -> list[Chosen]:
    """Return choices of values to recompute or offload that lower a stage's peak,
    cheapest first; empty where no choice does.

    Args:
      solved: the stage's plan, with all residuals saved.
      tasks: the tasks of its program.
      less_bytes: bytes by which its peak has to fall.
      seconds: time limit of the search.
    """
    labels = solved.solution.labels
    assert labels is not None, "there is no plan to change"
    asked = AskingTasks(solved.mesh_problem.model, labels, tasks).asked()
    question = _coarse(asked.question)
    asked = replace(asked, question=question)
    kept = evaluate(question, (SAVE,) * len(question.candidates))
    assert kept is not None
    budget = kept.peak_bytes - less_bytes
    answers: list[tuple[str, RematAnswer | None]] = []
    if budget > 0:
        answers.append((SOME, choose(question, budget, seconds=seconds)))
        answers += [(name, evaluate(question, c)) for name, c in of_all(asked)]
    found = [
        Chosen(name, choice_of(asked, answer), answer)
        for name, answer in answers
        if answer is not None
        and answer.peak_bytes <= budget
        and not {REMAT, OFFLOAD}.isdisjoint(answer.choices)
    ]
    return sorted(found, key=lambda c: c.answer.added_s)


def faster_in_flight(
    solved: SolvedMesh, tasks: Tasks, least_s: float, seconds: float
) -> Chosen | None:
    """Return the choice of values to recompute that shortens a stage's step, memory
    left aside: stacked residuals of loops are written and read. None where nothing
    saves enough.

    Args:
      solved: the stage's plan, with all residuals saved.
      tasks: the tasks of its program.
      least_s: seconds of a step that it has to save.
      seconds: time limit of the search.
    """
    labels = solved.solution.labels
    assert labels is not None, "there is no plan to change"
    asking = AskingTasks(solved.mesh_problem.model, labels, tasks)
    if asking.most_saved_s < least_s:
        return None
    asked = asking.asked()
    asked = replace(asked, question=_coarse(asked.question))
    kept = evaluate(asked.question, (SAVE,) * len(asked.question.candidates))
    assert kept is not None
    answers = [
        (SOME, choose(asked.question, MUCH_BYTES, seconds=seconds)),
        *((name, evaluate(asked.question, c)) for name, c in of_all(asked)),
    ]
    found = [
        Chosen(name, choice_of(asked, answer), answer)
        for name, answer in answers
        if answer is not None and REMAT in answer.choices
    ]
    best = min(found, key=lambda c: c.answer.added_s, default=None)
    is_worth_it = best and kept.added_s - best.answer.added_s >= least_s
    return best if is_worth_it else None


def _coarse(question: Question) -> Question:
    """Merge late times into a few, and drop `extra_bytes`: operands that are recomputed
    within a merged time are live one after the other."""
    few = coarse(question, LIMITS.late_times)
    if few is question:
        return question
    candidates = (replace(c, extra_bytes=0) for c in few.candidates)
    return replace(few, candidates=tuple(candidates))
