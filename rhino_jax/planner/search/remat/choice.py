"""Choice of the values to recompute so that a plan fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.planner.search.records import SolvedMesh
from rhino_jax.planner.search.remat.candidates import candidates_of
from rhino_jax.planner.search.remat.parts import parted
from rhino_jax.planner.search.remat.policies import fitting, of_all
from rhino_jax.planner.search.remat.rows import RematQuestion
from rhino_jax.solver.remat.model import choose
from rhino_jax.solver.remat.question import (
    OFFLOAD,
    REMAT,
    SAVE,
    RematAnswer,
    evaluate,
)


SOME = "selective remat"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice of what to recompute or offload.

    Attributes:
      name: the name of a policy; "selective remat" for a solver's choice.
      choice: the choice, for the pass "recompute".
      answer: its cost and memory.
    """

    name: str
    choice: RematChoice
    answer: RematAnswer


def recompute_choices(
    solved: SolvedMesh, budget_bytes: float, *, seconds: float = 30.0
) -> list[Chosen]:
    """Return solver choices and policies under which a plan fits, cheapest first.

    Args:
      solved: a plan, which need not fit.
      budget_bytes: the memory budget of one device.
      seconds: time limit of each search.
    """
    labels = solved.solution.labels
    assert labels is not None, "there is no plan to change"
    problem = solved.mesh_problem
    device = problem.model.analysis.target.device
    asked = candidates_of(
        problem.model, labels, problem.symmetry, device.host_bytes_per_s
    )
    best = _cheapest(asked, budget_bytes, seconds)
    if best is not None and not best.answer.added_s:
        return [best]
    found = [best] if best is not None else []
    for policy in fitting(asked, budget_bytes):
        choice = choice_of(asked, policy.answer, policy.first)
        found.append(Chosen(policy.name, choice, policy.answer))
    ordered = [
        replace(c, choice=replace(c.choice, ordered=device.defers_gradients))
        if c.choice.recompute
        else c
        for c in found
    ]
    return sorted(ordered, key=lambda c: c.answer.added_s)


def least_choice(solved: SolvedMesh) -> Chosen | None:
    """Return the policy for all layers under which a plan has the smallest peak, with
    its saved values offloaded if that lowers the peak; None where there is nothing to
    recompute or to offload.

    Args:
      solved: the plan of all nodes.
    """
    labels, problem = solved.solution.labels, solved.mesh_problem
    assert labels is not None, "there is no plan to change"
    device = problem.model.analysis.target.device
    asked = candidates_of(
        problem.model, labels, problem.symmetry, device.host_bytes_per_s
    )
    found: list[Chosen] = []
    for name, what in of_all(asked):
        for choices in dict.fromkeys([what, _offloaded(asked, what)]):
            answer = evaluate(asked.question, choices)
            if answer is not None:
                found.append(Chosen(name, choice_of(asked, answer), answer))
    least = min(found, key=lambda c: c.answer.peak_bytes, default=None)
    if least is None or not (least.choice.recompute or least.choice.offload):
        return None
    is_ordered = device.defers_gradients and bool(least.choice.recompute)
    return replace(least, choice=replace(least.choice, ordered=is_ordered))


def _offloaded(asked: RematQuestion, choices: tuple[str, ...]) -> tuple[str, ...]:
    """Offload the saved values, where they can be offloaded."""
    pairs = zip(asked.question.candidates, choices, strict=True)
    return tuple(
        OFFLOAD if what == SAVE and c.uses and c.offload_s is not None else what
        for c, what in pairs
    )


def _cheapest(
    asked: RematQuestion, budget_bytes: float, seconds: float
) -> Chosen | None:
    best: Chosen | None = None
    for first, question, waits_s in parted(asked):
        answer = choose(question, int(budget_bytes), seconds=seconds)
        if answer is None:
            continue
        answer = replace(answer, added_s=answer.added_s + waits_s)
        if best and answer.added_s >= best.answer.added_s:
            continue
        best = Chosen(SOME, choice_of(asked, answer, first), answer)
        if not answer.added_s:
            break
    return best


def choice_of(
    asked: RematQuestion, answer: RematAnswer, first: tuple[tuple[int, int], ...] = ()
) -> RematChoice:
    """Return an answer as a choice for the pass "recompute".

    Args:
      asked: the remat problem.
      answer: the solver's answer.
      first: (forward loop, number of first slices of its stacks that are saved).
    """
    chosen = list(zip(asked.values, answer.choices, strict=True))
    gone = {i for i, (_, what) in enumerate(chosen) if what == REMAT}
    remat = [v for v, what in chosen if what == REMAT]
    remat += [v for v, of in asked.followers.items() if not gone.isdisjoint(of)]
    sent = [v for v, what in chosen if what == OFFLOAD]
    needed = {n for i in gone for n in asked.question.candidates[i].needs}
    needed |= {
        n for of in asked.followers.values() if not gone.isdisjoint(of) for n in of
    }
    kept = [
        v
        for i, ((v, what), c) in enumerate(
            zip(chosen, asked.question.candidates, strict=True)
        )
        if what == SAVE and (not c.uses or (v in asked.sources and i in needed))
    ]
    return RematChoice(tuple(remat), tuple(kept), tuple(sent), first if gone else ())
