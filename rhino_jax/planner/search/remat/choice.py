"""The question that the planner asks about remat: which residuals a planned step, or a
stage, had best recompute or offload within a memory budget.

Next to the solver's choice there are common policies, by name:

    nothing saved              all of a layer is recomputed from its inputs
    products saved             ops other than matmuls are recomputed (`dots_saveable`)
    products of weights saved  so are matmuls with a batch dim, such as attention's
                               scores (`dots_with_no_batch_dims_saveable`)

Each may hold for all layers or for the last of them, while the first save all, as in
Galvatron. A policy's cost and memory are evaluated in the remat problem that the solver
gets; where that is too large to solve, policies are the only candidates.

Source: `jax.checkpoint_policies`; Miao et al., Galvatron (VLDB 2022), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rhino_jax.planner.search.remat.rows import (
    Chosen,
    RematQuestion,
    RerunWork,
    Slices,
)
from rhino_jax.solver.remat.model import choose
from rhino_jax.solver.remat.question import (
    OFFLOAD,
    REMAT,
    SAVE,
    Question,
    RematAnswer,
    evaluate,
)


NOTHING_SAVED = "nothing saved"

POLICIES: dict[str, RerunWork] = {
    NOTHING_SAVED: RerunWork.PRODUCT,
    "products saved": RerunWork.SMALL,
    "products of weights saved": RerunWork.BATCHED,
}
"""Name → the most work that is repeated for a value."""


def variants(asked: RematQuestion, name: str) -> Iterator[Chosen]:
    """Yield a policy for all layers and, first layers or slices saved, for the last."""
    layers = 1 + max((c.layer for c in asked.question.candidates), default=0)
    for k in range(asked.parts if layers > 1 else 1):
        choices = _choices(asked, POLICIES[name], round(k * layers / asked.parts))
        answer = evaluate(asked.question, choices)
        if answer is not None:
            yield asked.chosen(_named(asked, name, k), counted_once(asked, answer))
    every = whole(asked, name)
    for k, (first, question, saved_s) in enumerate(parted(asked)):
        answer = evaluate(question, every) if first else None
        if answer is not None:
            answer = replace(answer, added_s=answer.added_s + saved_s)
            answer = counted_once(asked, answer, first)
            yield asked.chosen(_named(asked, name, k), answer, first)


def whole(asked: RematQuestion, name: str) -> tuple[str, ...]:
    """Return the choice for every candidate under a policy for all layers."""
    return _choices(asked, POLICIES[name], 0)


def counted_once(
    asked: RematQuestion, answer: RematAnswer, first: Slices = ()
) -> RematAnswer:
    """Return an answer whose cost counts equations that recompute several values once.

    Args:
      asked: the remat problem.
      answer: an answer to it.
      first: the slices that are saved.
    """
    several = {0: [i for i, c in enumerate(answer.choices) if c == REMAT]}
    share = 1.0
    ((loop, count),) = first or ((0, 0),)
    if first:
        length, members = asked.loops[loop]
        several = {
            0: [i for i in several[0] if i not in members],
            1: [i for i in several[0] if i in members],
        }
        share = 1 - count / length
    there = [
        v
        for v, c in zip(asked.values, answer.choices, strict=True)
        if c in (SAVE, OFFLOAD)
    ]
    added_s = answer.added_s
    for k, again in several.items():
        rest = share if k else 1.0
        each = [asked.question.candidates[i].remat_s or 0.0 for i in again]
        once = asked.together_s([asked.values[i] for i in again], there)
        added_s += rest * min(0.0, once - sum(each))
    return replace(answer, added_s=max(0.0, added_s))


def _named(asked: RematQuestion, name: str, parts: int) -> str:
    return f"{name}, {parts} in {asked.parts} layers whole" if parts else name


def _choices(asked: RematQuestion, most: RerunWork, first: int) -> tuple[str, ...]:
    """Return the choices under a policy; layers before `first` save all.

    Values from which later layers are recomputed, such as the terms of a residual
    stream, are saved: otherwise all would be recomputed at once.
    """
    candidates = asked.question.candidates
    # Equivalent values are numbered by layer; where a first layer differs, numbers are
    # off by one.
    enters = {
        j
        for c in candidates
        for j in c.needs
        if c.like is not None and abs(candidates[j].layer - c.layer) > 1
    }
    within = asked.stacks | {i for i, c in enumerate(candidates) if c.like is not None}

    def is_recomputed(i: int) -> bool:
        c = candidates[i]
        is_late = c.like is None or c.layer >= first
        is_small = c.remat_s is not None and asked.work[i] <= most
        return is_late and is_small and i not in enters and (i in within or not within)

    return tuple(REMAT if is_recomputed(i) else SAVE for i in range(len(candidates)))


def parted(asked: RematQuestion) -> Iterator[tuple[Slices, Question, float]]:
    """Yield the remat problem, and those in which the first slices of the largest
    stacks are saved in any case, with the cost of saving these in seconds."""
    yield (), asked.question, 0.0
    candidates = asked.question.candidates
    if not asked.loops:
        return
    loop = max(
        asked.loops, key=lambda k: sum(candidates[i].bytes for i in asked.loops[k][1])
    )
    length, members = asked.loops[loop]
    for count in sorted(
        {round(length * k / asked.parts) for k in range(1, asked.parts)}
    ):
        if 0 < count < length:
            saved_s = sum(candidates[i].save_s for i in members if candidates[i].uses)
            question = _with_first(asked.question, members, count, length)
            yield ((loop, count),), question, saved_s * count / length


def _with_first(
    question: Question, members: tuple[int, ...], count: int, length: int
) -> Question:
    """Return the problem in which the first `count` of `length` slices of stacked
    residuals are saved in any case."""
    rest, candidates = (length - count) / length, list(question.candidates)
    changes: list[tuple[int, int]] = []
    for i in members:
        c = candidates[i]
        candidates[i] = replace(
            c,
            bytes=round(c.bytes * rest),
            remat_s=None if c.remat_s is None else c.remat_s * rest,
            offload_s=None if c.offload_s is None else c.offload_s * rest,
            save_s=c.save_s * rest,
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
    return replace(question, candidates=tuple(candidates), base=tuple(base))


SOME = "selective remat"

MUCH_BYTES = 1 << 60
"""A memory budget that is no limit."""


def ask(
    asked: RematQuestion, budget_bytes: float, *, effort: float = 15.0
) -> list[Chosen]:
    """Return the solver's choice and the cheapest variant of each policy that fit,
    cheapest first; empty where none fits, or none is cheaper than saving all.

    Args:
      asked: the residuals, with costs.
      budget_bytes: the memory budget of one device; infinite for no limit.
      effort: limit of each search, see `choose`.
    """
    best = _solved(asked, budget_bytes, effort)
    found = [best] if best is not None else []
    for name in POLICIES if best is None or best.answer.added_s else ():
        fits = (c for c in variants(asked, name) if c.answer.peak_bytes <= budget_bytes)
        cheapest = min(fits, key=lambda c: c.answer.added_s, default=None)
        found += [cheapest] if cheapest is not None else []
    found.sort(key=lambda c: c.answer.added_s)
    if not found or not str(found[0].choice):
        return []
    return [c for c in found if str(c.choice)]


def _solved(asked: RematQuestion, budget_bytes: float, effort: float) -> Chosen | None:
    """Return the solver's choice; None where it finds none that fits."""
    best: Chosen | None = None
    for first, question, saved_s in parted(asked):
        limit = int(min(budget_bytes, MUCH_BYTES))
        answer = choose(question, limit, effort=effort)
        if answer is None:
            continue
        answer = replace(answer, added_s=answer.added_s + saved_s)
        answer = counted_once(asked, answer, first)
        if best and answer.added_s >= best.answer.added_s:
            continue
        best = asked.chosen(SOME, answer, first)
        if not answer.added_s:
            break
    return best


def smallest_peak(asked: RematQuestion) -> Chosen | None:
    """Return the policy for all layers with the smallest peak, whatever its cost, with
    saved values offloaded if that lowers the peak; None where there is nothing to
    recompute or to offload."""
    found: list[Chosen] = []
    for name in POLICIES:
        choices = whole(asked, name)
        pairs = zip(asked.question.candidates, choices, strict=True)
        offloaded = tuple(
            OFFLOAD if what == SAVE and c.uses and c.offload_s is not None else what
            for c, what in pairs
        )
        for each in dict.fromkeys([choices, offloaded]):
            answer = evaluate(asked.question, each)
            found += [asked.chosen(name, answer)] if answer is not None else []
    least = min(found, key=lambda c: c.answer.peak_bytes, default=None)
    is_change = least and (least.choice.recompute or least.choice.offload)
    return least if is_change else None
