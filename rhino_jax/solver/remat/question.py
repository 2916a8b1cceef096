"""A remat problem: candidate residuals; cost and memory of a choice; coarser problems,
with fewer late times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace


SAVE, REMAT, OFFLOAD, GONE = "save", "remat", "offload", "gone"


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A candidate residual. Times are integers; those of late readers are late times.

    Attributes:
      bytes: bytes of the value.
      start: first time at which no early reader needs it any more.
      uses: late times at which it is read, ascending; empty if it is only needed to
        recompute others.
      needs: positions of candidates that its recomputation reads.
      remat_s: seconds to recompute it; None if that is impossible.
      offload_s: seconds that offloading costs; None if that is impossible.
      extra_bytes: additional temporary memory while it is recomputed.
      remat_bytes: its bytes after recomputation, if not all of it exists at once;
        None: `bytes`.
      like: group of candidates with equal choices in equal layers; None: none.
      layer: position of its layer among these.
      save_s: seconds that saving costs: written and read, if it would not go through
        memory otherwise.
      always_bytes: if saved, bytes live at all times in addition to `bytes`: as of all
        micro-batches in flight.
      sent_bytes: if offloaded, bytes live at all times: as of those in transfer.
      link_s: if offloaded, seconds of its transfers, which overlap with compute.
    """

    bytes: int
    start: int
    uses: tuple[int, ...]
    needs: tuple[int, ...] = ()
    remat_s: float | None = None
    offload_s: float | None = None
    extra_bytes: int = 0
    remat_bytes: int | None = None
    like: int | None = None
    layer: int = 0
    save_s: float = 0.0
    always_bytes: int = 0
    sent_bytes: int = 0
    link_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Question:
    """A remat problem.

    Attributes:
      candidates: the values, each after those that it needs.
      base: (time, bytes) of all other memory from that time on, ascending; it includes
        candidates while early ops need them.
      late: the first late time.
      beside_s: seconds of host transfers that compute hides; the rest is exposed.
    """

    candidates: tuple[SavedValue, ...]
    base: tuple[tuple[int, int], ...]
    late: int
    beside_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RematAnswer:
    """The solution of a remat problem.

    Attributes:
      choices: by candidate, "save", "remat" (recomputed), "offload" or "gone"
        (not needed).
      added_s: seconds that the choice costs.
      peak_bytes: largest memory at any time.
      bound_s: lower bound on the cost of any choice that fits.
    """

    choices: tuple[str, ...]
    added_s: float
    peak_bytes: int
    bound_s: float


def evaluate(question: Question, choices: Sequence[str]) -> RematAnswer | None:
    """Return cost and memory of a choice; None if a value that is read is missing."""
    candidates = question.candidates
    needed = [list(c.uses) for c in candidates]
    for i in reversed(range(len(candidates))):
        c, choice = candidates[i], choices[i]
        if not needed[i]:
            continue
        if choice == GONE or (choice == REMAT and c.remat_s is None):
            return None
        if choice == OFFLOAD and c.offload_s is None:
            return None
        if choice == REMAT:
            for j in c.needs:
                needed[j].append(min(needed[i]))
    changes: dict[int, int] = defaultdict(int)
    added, link, before, always = 0.0, 0.0, 0, 0
    for time, amount in question.base:
        changes[time] += amount - before
        before = amount
    for i, c in enumerate(candidates):
        if not needed[i]:
            continue
        first, last = min(needed[i]), max(needed[i])
        begin = c.start if choices[i] == SAVE else first
        amount = c.bytes
        if choices[i] == REMAT and c.remat_bytes is not None:
            amount = c.remat_bytes
        changes[begin] += amount
        changes[last + 1] -= amount
        if choices[i] == REMAT:
            added += c.remat_s or 0.0
            changes[first] += c.extra_bytes
            changes[first + 1] -= c.extra_bytes
        elif choices[i] == OFFLOAD:
            added += c.offload_s or 0.0
            link += c.link_s
            always += c.sent_bytes
        else:
            added += c.save_s
            always += c.always_bytes
    held = peak = 0
    for time in sorted(changes):
        held += changes[time]
        peak = max(peak, held)
    added += max(0.0, link - question.beside_s)
    said = tuple(choice if needed[i] else GONE for i, choice in enumerate(choices))
    return RematAnswer(said, added, peak + always, added)


def base_at(base: Sequence[tuple[int, int]], time: int) -> int:
    return max(((t, b) for t, b in base if t <= time), default=(0, 0))[1]


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
