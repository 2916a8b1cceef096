"""What may wait for a second reading, and what a choice costs and holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


KEEP, REMAKE, OFFLOAD, GONE = "keep", "remake", "offload", "gone"


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value. Times are whole numbers; those of late readers are late times.

    Attributes:
      bytes: of it.
      start: the first time at which nothing early needs it any more.
      uses: late times at which it is read, ascending; none for what is only needed to
        make others again.
      needs: positions of candidates that are read when it is made again.
      remake_s: seconds to make it again; None where that cannot be.
      offload_s: seconds that it costs to wait elsewhere; None where that cannot be.
      extra_bytes: besides, while it is made again.
      remade_bytes: of it, where it is made again, if that is not all of it at once.
      like: which candidates do alike in equal layers; None: none.
      layer: of which of these it is.
      keep_s: seconds that it costs to wait: written, and read, where it would else not
        go through memory.
      always_bytes: where it is kept, at all times, beside `bytes`: as of all
        micro-batches in flight.
      sent_bytes: where it waits elsewhere, at all times: as of those on their way.
      link_s: where it waits elsewhere, seconds of its way, beside which others work.
    """

    bytes: int
    start: int
    uses: tuple[int, ...]
    needs: tuple[int, ...] = ()
    remake_s: float | None = None
    offload_s: float | None = None
    extra_bytes: int = 0
    remade_bytes: int | None = None
    like: int | None = None
    layer: int = 0
    keep_s: float = 0.0
    always_bytes: int = 0
    sent_bytes: int = 0
    link_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Question:
    """Attributes:
    candidates: the values, each after those that it needs.
    base: (time, bytes) of all else from that time on, by time; of candidates, too,
        while early lines need them.
    late: the first late time.
    beside_s: seconds of the ways elsewhere that other work hides: what all of them take
        beyond is waited for.
    """

    candidates: tuple[SavedValue, ...]
    base: tuple[tuple[int, int], ...]
    late: int
    beside_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RematAnswer:
    """Attributes:
    choices: of every candidate, "keep", "remake", "offload" or "gone".
    added_s: what it costs.
    peak_bytes: the most memory at any time.
    bound_s: no choice that fits costs less.
    """

    choices: tuple[str, ...]
    added_s: float
    peak_bytes: int
    bound_s: float


def evaluate(question: Question, choices: Sequence[str]) -> RematAnswer | None:
    """What a choice costs and holds; None where something that is read is not there."""
    candidates = question.candidates
    needed = [list(c.uses) for c in candidates]
    for i in reversed(range(len(candidates))):
        c, choice = candidates[i], choices[i]
        if not needed[i]:
            continue
        if choice == GONE or (choice == REMAKE and c.remake_s is None):
            return None
        if choice == OFFLOAD and c.offload_s is None:
            return None
        if choice == REMAKE:
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
        begin = c.start if choices[i] == KEEP else first
        amount = c.bytes
        if choices[i] == REMAKE and c.remade_bytes is not None:
            amount = c.remade_bytes
        changes[begin] += amount
        changes[last + 1] -= amount
        if choices[i] == REMAKE:
            added += c.remake_s or 0.0
            changes[first] += c.extra_bytes
            changes[first + 1] -= c.extra_bytes
        elif choices[i] == OFFLOAD:
            added += c.offload_s or 0.0
            link += c.link_s
            always += c.sent_bytes
        else:
            added += c.keep_s
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
