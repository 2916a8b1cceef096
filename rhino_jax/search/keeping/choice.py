"""What to make again so that a plan fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rhino_jax.optimize.keeping.choose import choose
from rhino_jax.optimize.keeping.question import (
    KEEP,
    OFFLOAD,
    REMAKE,
    Answer,
    Question,
)
from rhino_jax.search.keeping.candidates import candidates_of
from rhino_jax.search.keeping.rows import Asked
from rhino_jax.search.limits import LIMITS
from rhino_jax.search.records import SolvedMesh
from rhino_jax.transform.recompute.choice import Choice


def recompute_choice(
    solved: SolvedMesh,
    budget_bytes: float,
    *,
    seconds: float = 30.0,
) -> tuple[Choice, Answer] | None:
    """What to make again so that a plan fits, at the least cost; None where nothing
    does.

    Args:
      solved: a plan, which need not fit.
      budget_bytes: of one device.
      seconds: for each search.
    """
    labels = solved.solution.labels
    assert labels is not None, "there is no plan to change"
    problem = solved.mesh_problem
    device = problem.model.analysis.target.device
    asked = candidates_of(
        problem.model, labels, problem.symmetry, device.host_bytes_per_s
    )
    best: tuple[Choice, Answer] | None = None
    for first, question, waits_s in _parted(asked):
        answer = choose(question, int(budget_bytes), seconds=seconds)
        if answer is None:
            continue
        answer = replace(answer, added_s=answer.added_s + waits_s)
        if best and answer.added_s >= best[1].added_s:
            continue
        choice = choice_of(asked, answer, first)
        if choice.recompute:
            choice = replace(choice, ordered=device.defers_gradients)
        best = choice, answer
        if not answer.added_s:
            break
    return best


def _parted(
    asked: Asked,
) -> Iterator[tuple[tuple[tuple[int, int], ...], Question, float]]:
    """The question, and those where the first slices of the largest stacks wait, with
    what these cost."""
    yield (), asked.question, 0.0
    candidates = asked.question.candidates
    if not asked.loops:
        return
    loop = max(
        asked.loops, key=lambda k: sum(candidates[i].bytes for i in asked.loops[k][1])
    )
    length, members = asked.loops[loop]
    for count in sorted(
        {round(length * k / LIMITS.loop_parts) for k in range(1, LIMITS.loop_parts)}
    ):
        if 0 < count < length:
            waits_s = sum(candidates[i].keep_s for i in members if candidates[i].uses)
            question = _with_first(asked.question, members, count, length)
            yield ((loop, count),), question, waits_s * count / length


def _with_first(
    question: Question, members: tuple[int, ...], count: int, length: int
) -> Question:
    """Of stacks that are read late, so many slices wait whatever is chosen."""
    rest, candidates = (length - count) / length, list(question.candidates)
    changes: list[tuple[int, int]] = []
    for i in members:
        c = candidates[i]
        candidates[i] = replace(
            c,
            bytes=round(c.bytes * rest),
            remake_s=None if c.remake_s is None else c.remake_s * rest,
            offload_s=None if c.offload_s is None else c.offload_s * rest,
            keep_s=c.keep_s * rest,
        )
        if c.uses:
            waits = c.bytes - candidates[i].bytes
            changes += [(c.start, waits), (c.uses[-1] + 1, -waits)]
    times = sorted({t for t, _ in (*question.base, *changes)})
    base, at, held = [], 0, 0
    for time in times:
        while at < len(question.base) and question.base[at][0] <= time:
            held = question.base[at][1]
            at += 1
        base.append((time, held + sum(n for t, n in changes if t <= time)))
    return Question(tuple(candidates), tuple(base), question.late)


def choice_of(
    asked: Asked, answer: Answer, first: tuple[tuple[int, int], ...] = ()
) -> Choice:
    """An answer as a choice for the pass "recompute".

    Args:
      asked: what was asked.
      answer: what the engine found.
      first: (forward loop, slices of its stacks that wait).
    """
    chosen = list(zip(asked.values, answer.choices, strict=True))
    gone = {i for i, (_, what) in enumerate(chosen) if what == REMAKE}
    remade = [v for v, what in chosen if what == REMAKE]
    remade += [v for v, of in asked.followers.items() if not gone.isdisjoint(of)]
    sent = [v for v, what in chosen if what == OFFLOAD]
    kept = [
        v
        for (v, what), c in zip(chosen, asked.question.candidates, strict=True)
        if what == KEEP and not c.uses
    ]
    return Choice(tuple(remade), tuple(kept), tuple(sent), first if gone else ())
