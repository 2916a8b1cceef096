"""What forward tasks of a stage had better leave for its backward tasks.

A stage holds what they leave of every micro-batch in flight, what is made again of one,
and what waits in the host's memory of those on their way.
"""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.planner.search.limits import LIMITS
from rhino_jax.planner.search.records import SolvedMesh
from rhino_jax.planner.search.remat.choice import SOME, Chosen, choice_of
from rhino_jax.planner.search.remat.policies import of_all
from rhino_jax.planner.search.remat.tasks import AskingTasks, Tasks
from rhino_jax.solver.remat.choose import choose
from rhino_jax.solver.remat.coarse import coarse
from rhino_jax.solver.remat.question import (
    KEEP,
    OFFLOAD,
    REMAKE,
    Question,
    RematAnswer,
    evaluate,
)


MUCH_BYTES = 1 << 60
"""Memory that is no limit."""


def choices_in_flight(
    solved: SolvedMesh, tasks: Tasks, less_bytes: int, *, seconds: float
) -> list[Chosen]:
    """What to make again, or to have in the host's memory, so that a stage takes less,
    the cheapest first; nothing where no choice does.

    Args:
      solved: its plan, with all of it kept.
      tasks: of the program.
      less_bytes: by how much its peak has to fall.
      seconds: for the search.
    """
    labels = solved.solution.labels
    assert labels is not None, "there is no plan to change"
    asked = AskingTasks(solved.mesh_problem.model, labels, tasks).asked()
    question = _coarse(asked.question)
    asked = replace(asked, question=question)
    kept = evaluate(question, (KEEP,) * len(question.candidates))
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
        and not {REMAKE, OFFLOAD}.isdisjoint(answer.choices)
    ]
    return sorted(found, key=lambda c: c.answer.added_s)


def faster_in_flight(
    solved: SolvedMesh, tasks: Tasks, least_s: float, seconds: float
) -> Chosen | None:
    """What to make again so that a stage takes less time, memory left aside: what loops
    stack is written and read. None where nothing saves so much.

    Args:
      solved: its plan, with all of it kept.
      tasks: of the program.
      least_s: seconds of a step.
      seconds: for the search.
    """
    labels = solved.solution.labels
    assert labels is not None, "there is no plan to change"
    asking = AskingTasks(solved.mesh_problem.model, labels, tasks)
    if asking.most_saved_s < least_s:
        return None
    asked = asking.asked()
    asked = replace(asked, question=_coarse(asked.question))
    kept = evaluate(asked.question, (KEEP,) * len(asked.question.candidates))
    assert kept is not None
    answers = [
        (SOME, choose(asked.question, MUCH_BYTES, seconds=seconds)),
        *((name, evaluate(asked.question, c)) for name, c in of_all(asked)),
    ]
    found = [
        Chosen(name, choice_of(asked, answer), answer)
        for name, answer in answers
        if answer is not None and REMAKE in answer.choices
    ]
    best = min(found, key=lambda c: c.answer.added_s, default=None)
    is_worth_it = best and kept.added_s - best.answer.added_s >= least_s
    return best if is_worth_it else None


def _coarse(question: Question) -> Question:
    """With few late times. What values are made of follows one another between two."""
    few = coarse(question, LIMITS.late_times)
    if few is question:
        return question
    candidates = (replace(c, extra_bytes=0) for c in few.candidates)
    return replace(few, candidates=tuple(candidates))
