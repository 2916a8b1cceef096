"""The CP-SAT model of a remat problem (see the package), and the cheapest choice that
fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from ortools.sat.python import cp_model

from rhino_jax.solver.remat.question import (
    GONE,
    OFFLOAD,
    REMAT,
    SAVE,
    Question,
    RematAnswer,
    SavedValue,
    base_at,
    evaluate,
)


PER_S = 1e9
"""Units of the objective per second: it is in nanoseconds."""


class RematModel:
    """The model of a remat problem."""

    def __init__(self, question: Question, budget_bytes: int) -> None:
        self.question, self.model = question, cp_model.CpModel()
        candidates = question.candidates
        self.points = sorted({p for c in candidates for p in c.uses})
        self.place = {p: n for n, p in enumerate(self.points)}
        self.window = _windows(candidates)
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
        if c.remat_s is None:
            model.add(makings <= self.sent[i])

    def _needs(self, i: int, j: int) -> None:
        for n in self._span(i):
            if (j, n) in self.there:
                self.model.add(self.there[j, n] >= self.made[i, n] - self.sent[i])
            else:
                self.model.add(self.made[i, n] <= self.sent[i])

    def _not_before_needed(self) -> None:
        """Require that a value is recomputed when it is first read."""
        readers: dict[int, list[int]] = defaultdict(list)
        for i, c in enumerate(self.question.candidates):
            for j in c.needs:
                readers[j].append(i)
        for (j, n), made in self.made.items():
            if self.points[n] not in self.question.candidates[j].uses:
                others = [self.made[i, n] for i in readers[j] if (i, n) in self.made]
                self.model.add(made <= sum(others))

    def _alike(self) -> None:
        """Require equal choices in the first of equal layers, and in the others."""
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
        """Constrain memory at one time.

        Between two late times, values that are live at both count.
        """
        pairs = zip(self.question.candidates, self.kept, strict=True)
        held: list[cp_model.LinearExprT] = [
            c.always_bytes * kept for c, kept in pairs if c.always_bytes
        ]
        pairs = zip(self.question.candidates, self.sent, strict=True)
        held += [c.sent_bytes * sent for c, sent in pairs if c.sent_bytes]
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
                    held.append(self._held(i, after, self.there[i, after]))
                    if c.extra_bytes:
                        held.append(c.extra_bytes * self._recomputed(i, after))
                elif is_here:
                    held.append(self._held(i, after, self._both(i, after)))
        room = budget_bytes - base_at(self.question.base, time)
        self.model.add(sum(held) <= room)

    def _held(self, i: int, n: int, there: cp_model.IntVar) -> cp_model.LinearExprT:
        """Return the bytes of a value, if it is live."""
        c = self.question.candidates[i]
        if c.remat_bytes is None or c.remat_bytes == c.bytes:
            return c.bytes * there
        is_recomputed = self.model.new_bool_var("")
        if c.remat_bytes > c.bytes:
            self.model.add(is_recomputed >= there - self.kept[i] - self.sent[i])
            return c.bytes * there + (c.remat_bytes - c.bytes) * is_recomputed
        self.model.add(is_recomputed <= there)
        makings = sum(self.made[i, m] for m in self._span(i) if m <= n)
        self.model.add(is_recomputed <= makings)
        self.model.add(is_recomputed + self.sent[i] <= 1)
        return c.bytes * there - (c.bytes - c.remat_bytes) * is_recomputed

    def _recomputed(self, i: int, n: int) -> cp_model.IntVar:
        """Return the variable that is 1 if a value is recomputed at a late time."""
        remat = self.model.new_bool_var("")
        self.model.add(remat >= self.made[i, n] - self.sent[i])
        return remat

    def _both(self, i: int, n: int) -> cp_model.IntVar:
        """Return the variable that is 1 if a value stays live to the next late time."""
        both = self.model.new_bool_var("")
        here, then = self.there[i, n], self.there[i, n + 1]
        self.model.add(both >= here + then - self.made[i, n + 1] - 1)
        return both

    def _cost(self) -> cp_model.LinearExprT:
        terms: list[cp_model.LinearExprT] = []
        for i, c in enumerate(self.question.candidates):
            remake, offload = (
                round((s or 0.0) * PER_S) for s in (c.remat_s, c.offload_s)
            )
            makings = sum(self.made[i, n] for n in self._span(i))
            terms.append(remake * makings + (offload - remake) * self.sent[i])
            if c.save_s:
                terms.append(round(c.save_s * PER_S) * self.kept[i])
        return sum([*terms, *self._waited()])

    def _waited(self) -> list[cp_model.LinearExprT]:
        """Return the nanoseconds of host transfers that nothing hides."""
        ways = [round(c.link_s * PER_S) for c in self.question.candidates]
        if not any(ways):
            return []
        waited = self.model.new_int_var(0, sum(ways), "")
        pairs = zip(ways, self.sent, strict=True)
        taken = sum(way * sent for way, sent in pairs)
        self.model.add(waited >= taken - round(self.question.beside_s * PER_S))
        return [waited]

    def choices(self, solver: cp_model.CpSolver) -> tuple[str, ...]:
        """Return the solver's choice for every value."""
        found = []
        for i in range(len(self.question.candidates)):
            is_made = any(solver.value(self.made[i, n]) for n in self._span(i))
            if solver.value(self.sent[i]):
                found.append(OFFLOAD)
            else:
                found.append(
                    REMAT if is_made else SAVE if solver.value(self.kept[i]) else GONE
                )
        return tuple(found)


def num_variables(question: Question) -> int:
    """Return the number of (value, late time) pairs at which it may be live."""
    return sum(w[1] - w[0] + 1 for w in _windows(question.candidates) if w)


def _windows(candidates: Sequence[SavedValue]) -> list[tuple[int, int] | None]:
    """Return the first and last late time, by position, at which each may be needed."""
    points = sorted({p for c in candidates for p in c.uses})
    place = {p: n for n, p in enumerate(points)}
    found: list[tuple[int, int] | None] = [
        (place[c.uses[0]], place[c.uses[-1]]) if c.uses else None for c in candidates
    ]
    for i in reversed(range(len(candidates))):
        window = found[i]
        if window is None or candidates[i].remat_s is None:
            continue
        for j in candidates[i].needs:
            mine = found[j] or window
            # `i` is recomputed when it is first read, and no later.
            latest = place[candidates[i].uses[0]] if candidates[i].uses else window[1]
            found[j] = min(mine[0], window[0]), max(mine[1], latest)
    return found


MAX_VARIABLES = 20_000
"""Largest number of (value, late time) pairs: with more, building the model takes
longer than planning most programs."""


def choose(
    question: Question, budget_bytes: int, *, effort: float = 15.0, seed: int = 0
) -> RematAnswer | None:
    """Return the cheapest choice that fits; None if there is none.

    Args:
      question: the values; None is returned if they are too many.
      budget_bytes: memory budget at every time.
      effort: limit on CP-SAT's deterministic seconds, after which the best choice so
        far is returned: the same on every host, however busy.
      seed: seed of the search.
    """
    all_kept = evaluate(question, (SAVE,) * len(question.candidates))
    is_free = not any(c.save_s for c in question.candidates)
    if all_kept is not None and all_kept.peak_bytes <= budget_bytes and is_free:
        return all_kept
    has_uses = any(c.uses for c in question.candidates)
    if not has_uses or num_variables(question) > MAX_VARIABLES:
        return None
    model = RematModel(question, budget_bytes)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found = evaluate(question, model.choices(solver))
    assert found is not None
    bound = solver.best_objective_bound / PER_S
    return RematAnswer(found.choices, found.added_s, found.peak_bytes, bound)
