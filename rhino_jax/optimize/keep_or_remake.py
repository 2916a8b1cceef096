"""Which values wait in memory for a second reading, and which are made again for it.

Every value is made once, early. Late readers read it again: it waits until then, or it
is made once more when it is first needed, of other values that are there then, or it
waits elsewhere and is fetched. The cheapest choice whose memory fits at all times is
found by CP-SAT.

Variables   k[i]        value i waits
            o[i]        it waits elsewhere
            m[i, p]     it is made again, or fetched, at the late time p
            a[i, p]     it is there at p
Subject to  k[i] + Σ_p m[i, p] ≤ 1;  Σ_p m[i, p] = 1 where o[i]
            a[i, p] ≤ a[i, p-1] + m[i, p],  a[i, before all late times] = k[i]
            a[i, p] = 1 where i is read at p;  a[j, p] ≥ m[i, p] - o[i] where i needs j
            base[p] + Σ_i bytes[i]·a[i, p] ≤ budget at every time p
Minimise    Σ seconds
Like values of equal layers do alike, but that the first layers may do otherwise.

Source: the model is that of Jain et al., Checkmate (MLSys 2020), with one more making
of each value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ortools.sat.python import cp_model


KEEP, REMAKE, OFFLOAD, GONE = "keep", "remake", "offload", "gone"


@dataclass(frozen=True, slots=True)
class Candidate:
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
      like: which candidates do alike in equal layers; None: none.
      layer: of which of these it is.
    """

    bytes: int
    start: int
    uses: tuple[int, ...]
    needs: tuple[int, ...] = ()
    remake_s: float | None = None
    offload_s: float | None = None
    extra_bytes: int = 0
    like: int | None = None
    layer: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """Attributes:
    candidates: the values, each after those that it needs.
    base: (time, bytes) of all else from that time on, by time; of candidates, too,
        while early lines need them.
    late: the first late time.
    """

    candidates: tuple[Candidate, ...]
    base: tuple[tuple[int, int], ...]
    late: int


@dataclass(frozen=True, slots=True)
class Answer:
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


def choose(
    question: Question, budget_bytes: int, *, seconds: float = 30.0, seed: int = 0
) -> Answer | None:
    """The cheapest choice that fits; None where none does.

    Args:
      question: the values.
      budget_bytes: what memory holds at every time.
      seconds: after which the best choice so far will do.
      seed: of the search.
    """
    all_kept = evaluate(question, (KEEP,) * len(question.candidates))
    if all_kept is not None and all_kept.peak_bytes <= budget_bytes:
        return all_kept
    model = _Model(question, budget_bytes)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found = evaluate(question, model.choices(solver))
    assert found is not None
    bound = solver.best_objective_bound / _PER_S
    return Answer(found.choices, found.added_s, found.peak_bytes, bound)


def evaluate(question: Question, choices: Sequence[str]) -> Answer | None:
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
    added, before = 0.0, 0
    for time, amount in question.base:
        changes[time] += amount - before
        before = amount
    for i, c in enumerate(candidates):
        if not needed[i]:
            continue
        first, last = min(needed[i]), max(needed[i])
        begin = c.start if choices[i] == KEEP else first
        changes[begin] += c.bytes
        changes[last + 1] -= c.bytes
        if choices[i] == REMAKE:
            added += c.remake_s or 0.0
            changes[first] += c.extra_bytes
            changes[first + 1] -= c.extra_bytes
        elif choices[i] == OFFLOAD:
            added += c.offload_s or 0.0
    held = peak = 0
    for time in sorted(changes):
        held += changes[time]
        peak = max(peak, held)
    said = tuple(choice if needed[i] else GONE for i, choice in enumerate(choices))
    return Answer(said, added, peak, added)


_PER_S = 1e9
"""The objective is in nanoseconds."""


class _Model:
    """The model of a question."""

    def __init__(self, question: Question, budget_bytes: int) -> None:
        self.question, self.model = question, cp_model.CpModel()
        candidates = question.candidates
        self.points = sorted({p for c in candidates for p in c.uses})
        self.place = {p: n for n, p in enumerate(self.points)}
        self.window = _windows(candidates, self.place)
        new = self.model.new_bool_var
        self.kept = [new("") for _ in candidates]
        self.sent = [new("") for _ in candidates]
        self.made: dict[tuple[int, int], cp_model.IntVar] = {}
        self.there: dict[tuple[int, int], cp_model.IntVar] = {}
        for i in range(len(candidates)):
            self._lives(i)
        for i, c in enumerate(candidates):
            assert all(j < i for j in c.needs), "what a value needs stands before it"
            for j in c.needs:
                self._needs(i, j)
        self._not_before_needed()
        self._alike()
        self._fits(budget_bytes)
        self.model.minimize(self._cost())

    def _span(self, i: int) -> range:
        window = self.window[i]
        return range(window[0], window[1] + 1) if window else range(0)

    def _lives(self, i: int) -> None:
        c, model = self.question.candidates[i], self.model
        span = self._span(i)
        for n in span:
            self.there[i, n] = model.new_bool_var("")
            self.made[i, n] = model.new_bool_var("")
            before = self.there[i, n - 1] if n > span.start else self.kept[i]
            model.add(self.there[i, n] <= before + self.made[i, n])
            model.add(self.made[i, n] <= self.there[i, n])
        for p in c.uses:
            model.add(self.there[i, self.place[p]] == 1)
        makings = sum(self.made[i, n] for n in span)
        model.add(self.kept[i] + makings <= 1)
        model.add(makings >= self.sent[i])
        if c.offload_s is None:
            model.add(self.sent[i] == 0)
        if c.remake_s is None:
            model.add(makings <= self.sent[i])

    def _needs(self, i: int, j: int) -> None:
        for n in self._span(i):
            if (j, n) in self.there:
                self.model.add(self.there[j, n] >= self.made[i, n] - self.sent[i])
            else:
                self.model.add(self.made[i, n] <= self.sent[i])

    def _not_before_needed(self) -> None:
        """Whoever makes a value again does so when it is first read."""
        readers: dict[int, list[int]] = defaultdict(list)
        for i, c in enumerate(self.question.candidates):
            for j in c.needs:
                readers[j].append(i)
        for (j, n), made in self.made.items():
            if self.points[n] not in self.question.candidates[j].uses:
                others = [self.made[i, n] for i in readers[j] if (i, n) in self.made]
                self.model.add(made <= sum(others))

    def _alike(self) -> None:
        """The first layers of equal ones do one thing, the others another."""
        groups: dict[int, list[int]] = defaultdict(list)
        layers: set[int] = set()
        for i, c in enumerate(self.question.candidates):
            if c.like is not None:
                groups[c.like].append(i)
                layers.add(c.layer)
        first = {layer: self.model.new_bool_var("") for layer in sorted(layers)}
        ordered = list(first.values())
        for one, other in pairwise(ordered):
            self.model.add(one >= other)
        for members in groups.values():
            for variables in (self.kept, self.sent):
                does = [self.model.new_bool_var("") for _ in range(2)]
                for i in members:
                    is_first = first[self.question.candidates[i].layer]
                    same, otherwise = (variables[i] == d for d in does)
                    self.model.add(same).only_enforce_if(is_first)
                    self.model.add(otherwise).only_enforce_if(is_first.negated())

    def _fits(self, budget_bytes: int) -> None:
        question = self.question
        begins = {c.start for c in question.candidates if c.start < question.late}
        for time in sorted({*(t for t, _ in question.base), *begins}):
            self._row(time, budget_bytes)
        for time in self.points:
            self._row(time, budget_bytes)

    def _row(self, time: int, budget_bytes: int) -> None:
        """Memory at one time; between two late times that is all that may be there."""
        held: list[cp_model.LinearExprT] = []
        after = self.place.get(time)
        if after is None and time >= self.points[0]:
            after = max(n for n, p in enumerate(self.points) if p < time)
        for i, c in enumerate(self.question.candidates):
            span = self._span(i)
            if not span:
                continue
            if after is None or after < span.start:
                if c.start <= time:
                    held.append(c.bytes * self.kept[i])
            elif (i, after) in self.there:
                is_here = time in self.place or (i, after + 1) in self.there
                if is_here and time in self.place:
                    held.append(c.bytes * self.there[i, after])
                    if c.extra_bytes:
                        held.append(c.extra_bytes * self._remade(i, after))
                elif is_here:
                    held.append(c.bytes * self._both(i, after))
        room = budget_bytes - _base_at(self.question.base, time)
        self.model.add(sum(held) <= room)

    def _remade(self, i: int, n: int) -> cp_model.IntVar:
        """Whether a value is made again at a late time, not fetched."""
        remade = self.model.new_bool_var("")
        self.model.add(remade >= self.made[i, n] - self.sent[i])
        return remade

    def _both(self, i: int, n: int) -> cp_model.IntVar:
        """Whether a value is there at a late time and, unmade, at the next."""
        both = self.model.new_bool_var("")
        here, then = self.there[i, n], self.there[i, n + 1]
        self.model.add(both >= here + then - self.made[i, n + 1] - 1)
        return both

    def _cost(self) -> cp_model.LinearExprT:
        terms: list[cp_model.LinearExprT] = []
        for i, c in enumerate(self.question.candidates):
            remake, offload = (
                round((s or 0.0) * _PER_S) for s in (c.remake_s, c.offload_s)
            )
            makings = sum(self.made[i, n] for n in self._span(i))
            terms.append(remake * makings + (offload - remake) * self.sent[i])
        return sum(terms)

    def choices(self, solver: cp_model.CpSolver) -> tuple[str, ...]:
        """What the solver found."""
        found = []
        for i in range(len(self.question.candidates)):
            is_made = any(solver.value(self.made[i, n]) for n in self._span(i))
            if solver.value(self.sent[i]):
                found.append(OFFLOAD)
            else:
                found.append(
                    REMAKE if is_made else KEEP if solver.value(self.kept[i]) else GONE
                )
        return tuple(found)


def _windows(
    candidates: Sequence[Candidate], place: dict[int, int]
) -> list[tuple[int, int] | None]:
    """First and last late time, by number, at which each may be needed."""
    found: list[tuple[int, int] | None] = [
        (place[c.uses[0]], place[c.uses[-1]]) if c.uses else None for c in candidates
    ]
    for i in reversed(range(len(candidates))):
        window = found[i]
        if window is None or candidates[i].remake_s is None:
            continue
        for j in candidates[i].needs:
            mine = found[j] or window
            # It may be made when it is first read, and no later.
            latest = place[candidates[i].uses[0]] if candidates[i].uses else window[1]
            found[j] = min(mine[0], window[0]), max(mine[1], latest)
    return found


def _base_at(base: Sequence[tuple[int, int]], time: int) -> int:
    return max(((t, b) for t, b in base if t <= time), default=(0, 0))[1]
