"""Coarser remat problems, with fewer late times."""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.solver.remat.question import Question, base_at


def coarse(question: Question, most: int) -> Question:
    """Merge late times into at most `most` groups, each treated as one time.

    Values live at one time of a group count as live at all of it. No choice uses less
    memory than before.
    """
    times = sorted({t for c in question.candidates for t in c.uses})
    if len(times) <= most:
        return question
    size = -(-len(times) // most)
    firsts = times[::size]
    first = {t: firsts[k // size] for k, t in enumerate(times)}
    base = [(t, amount) for t, amount in question.base if t < firsts[0]]
    ends = [*firsts[1:], None]
    for start, stop in zip(firsts, ends, strict=True):
        inside = [
            amount
            for t, amount in question.base
            if t >= start and (stop is None or t < stop)
        ]
        base.append((start, max([base_at(question.base, start), *inside])))
    candidates = tuple(
        replace(c, uses=tuple(sorted({first[t] for t in c.uses})))
        for c in question.candidates
    )
    return replace(question, candidates=candidates, base=tuple(base))
