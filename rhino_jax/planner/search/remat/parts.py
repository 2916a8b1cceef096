"""Remat problems in which a loop's first stacked slices are always saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rhino_jax.planner.search.limits import LIMITS
from rhino_jax.planner.search.remat.rows import RematQuestion
from rhino_jax.solver.remat.question import Question


def parted(
    asked: RematQuestion,
) -> Iterator[tuple[tuple[tuple[int, int], ...], Question, float]]:
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
        {round(length * k / LIMITS.loop_parts) for k in range(1, LIMITS.loop_parts)}
    ):
        if 0 < count < length:
            waits_s = sum(candidates[i].save_s for i in members if candidates[i].uses)
            question = _with_first(asked.question, members, count, length)
            yield ((loop, count),), question, waits_s * count / length


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
