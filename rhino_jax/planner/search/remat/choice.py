"""The question that the planner asks about remat: which residuals a planned step, or a
stage, had best recompute or offload within a memory budget; with the value ids of its
candidates, and answers to it.

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

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from rhino_jax.ir.program import Op
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.solver.remat.question import (
    OFFLOAD,
    REMAT,
    SAVE,
    Question,
    RematAnswer,
    SavedValue,
    evaluate,
)


Slices = tuple[tuple[int, int], ...]
"""(Forward loop, number of first slices of its stacks that are saved), if any are."""


class RerunWork(IntEnum):
    """The largest kind of work that recomputing ops repeats: no matmul; matmuls that
    all have a batch dim, such as attention's scores; other matmuls, such as those with
    weights; or whole loops."""

    SMALL = 0
    BATCHED = 1
    PRODUCT = 2
    LOOP = 3

    @classmethod
    def of(cls, op: Op) -> RerunWork:
        """Return the kind of one op, whatever is in its regions."""
        if op.call is not None and op.call.trip_count > 1:
            return cls.LOOP
        if not op.traits.is_contraction or op.rule is None:
            return cls.SMALL
        if op.traits.kind is OpKind.ATTENTION:
            return cls.BATCHED
        layouts = (*op.rule.operands, *op.rule.results)
        factors = [{f for dim in layout for f in dim} for layout in layouts]
        return cls.BATCHED if set.intersection(*factors) else cls.PRODUCT


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice of what to recompute or offload.

    Attributes:
      name: the name of a policy, with the share of layers that save all, if any do;
        "selective remat" for a solver's choice.
      choice: the choice, for the pass "recompute".
      answer: its cost and memory.
    """

    name: str
    choice: RematChoice
    answer: RematAnswer


@dataclass(frozen=True, slots=True)
class RematQuestion:
    """A remat problem of a step or of a stage, and the values that it is about.

    Attributes:
      question: candidates that may be saved, and the rest of memory.
      values: the value id of each candidate: for a stack that of the loop's result, for
        a value that would have to be stacked that in the loop's body.
      sources: values that no op of the backward pass reads, but that others are
        recomputed from there.
      loops: forward loop → (trip count, candidates that it stacks).
      together_s: seconds to recompute the first values, given the second ones:
        equations that several need count once, where each candidate counts them.
      work: for each candidate, the work that recomputing it repeats: see `RerunWork`.
      followers: residual that is never stored, since compilers compute it where it is
        read → candidates with which it is recomputed: those that it is computed from,
        and those computed from it. Read as saved by a recomputation, it would be stored
        for it: a float32 exponential in place of a softmax in bfloat16.
      is_ordered: see `RematChoice.ordered`.
      parts: number of parts of a loop's stacks, the first of which may be saved while
        the others are recomputed; 1: all slices alike.
    """

    question: Question
    values: tuple[int, ...]
    sources: frozenset[int]
    loops: Mapping[int, tuple[int, tuple[int, ...]]]
    followers: Mapping[int, tuple[int, ...]]
    work: tuple[RerunWork, ...]
    together_s: Callable[[Collection[int], Collection[int]], float]
    is_ordered: bool = False
    parts: int = 1

    @property
    def all_saved(self) -> RematAnswer:
        """Cost and memory of saving all residuals."""
        found = evaluate(self.question, (SAVE,) * len(self.question.candidates))
        assert found is not None, "what is saved needs nothing"
        return found

    @property
    def stacks(self) -> frozenset[int]:
        """The candidates that loops stack."""
        return frozenset(i for _, members in self.loops.values() for i in members)

    def stacked_bytes(self, answer: RematAnswer) -> int:
        """Return the bytes that loops stack."""
        candidates, choices = self.question.candidates, answer.choices
        return sum(candidates[i].bytes for i in self.stacks if choices[i] == SAVE)

    def stacked_at(self, per_byte_s: float) -> RematQuestion:
        """Return the problem in which a stacked byte costs `per_byte_s` seconds, in
        stacks with equal slices."""
        stacks = self.stacks
        candidates = tuple(
            replace(c, save_s=c.bytes * per_byte_s) if i in stacks else c
            for i, c in enumerate(self.question.candidates)
        )
        question = replace(self.question, candidates=candidates)
        return replace(self, question=question, parts=1)

    def chosen(
        self, name: str, answer: RematAnswer, first: Slices = (), saved_s: float = 0.0
    ) -> Chosen:
        """Return an answer as a choice for the pass "recompute"; its cost counts
        equations that recompute several values once.

        Args:
          name: see `Chosen`.
          answer: the answer.
          first: the slices that are saved.
          saved_s: the cost of saving these in seconds.
        """
        candidates = self.question.candidates
        pairs = list(zip(self.values, answer.choices, strict=True))
        gone = [i for i, (_, what) in enumerate(pairs) if what == REMAT]
        several = [(1.0, gone)]
        if first:
            ((loop, count),) = first
            length, members = self.loops[loop]
            several = [
                (1.0, [i for i in gone if i not in members]),
                (1 - count / length, [i for i in gone if i in members]),
            ]
        there = [v for v, what in pairs if what in (SAVE, OFFLOAD)]
        added_s = answer.added_s + saved_s
        for share, again in several:
            each_s = sum(candidates[i].remat_s or 0.0 for i in again)
            once_s = self.together_s([self.values[i] for i in again], there)
            added_s += share * min(0.0, once_s - each_s)
        added_s = max(0.0, added_s)
        bound_s = min(answer.bound_s, added_s)
        follow = {
            v: of for v, of in self.followers.items() if not {*gone}.isdisjoint(of)
        }
        needed = {n for i in gone for n in candidates[i].needs}.union(*follow.values())
        kept = [
            v
            for i, ((v, what), c) in enumerate(zip(pairs, candidates, strict=True))
            if what == SAVE and (not c.uses or (v in self.sources and i in needed))
        ]
        choice = RematChoice(
            (*(self.values[i] for i in gone), *follow),
            tuple(kept),
            tuple(v for v, what in pairs if what == OFFLOAD),
            first if gone else (),
            ordered=self.is_ordered and bool(gone or follow),
        )
        return Chosen(name, choice, replace(answer, added_s=added_s, bound_s=bound_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class RematRow(SavedValue):
    """A candidate for rematerialization whose `needs` are value ids.

    Attributes:
      place: (top-level equation, 1 + equation of the loop's body, or 0), for order.
      value: the value's id.
      work: the work that recomputing it repeats.
      makes: ids of all values that recomputing it computes.
    """

    place: tuple[int, int]
    value: int
    work: RerunWork = RerunWork.SMALL
    makes: frozenset[int] = frozenset()


NOTHING_SAVED = "nothing saved"

POLICIES: dict[str, RerunWork] = {
    NOTHING_SAVED: RerunWork.PRODUCT,
    "products saved": RerunWork.SMALL,
    "products of weights saved": RerunWork.BATCHED,
}
"""Name → the most work that is repeated for a value."""


def variants(asked: RematQuestion, name: str) -> Iterator[Chosen]:
    """Yield a policy for all layers and, first layers or slices saved, for the last."""

    def named(parts: int) -> str:
        return f"{name}, {parts} in {asked.parts} layers whole" if parts else name

    layers = 1 + max((c.layer for c in asked.question.candidates), default=0)
    for k in range(asked.parts if layers > 1 else 1):
        choices = _choices(asked, POLICIES[name], round(k * layers / asked.parts))
        answer = evaluate(asked.question, choices)
        if answer is not None:
            yield asked.chosen(named(k), answer)
    every = whole(asked, name)
    for k, (first, question, saved_s) in enumerate(parted(asked)):
        answer = evaluate(question, every) if first else None
        if answer is not None:
            yield asked.chosen(named(k), answer, first, saved_s)


def whole(asked: RematQuestion, name: str) -> tuple[str, ...]:
    """Return the choice for every candidate under a policy for all layers."""
    return _choices(asked, POLICIES[name], 0)


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
    counts = {round(length * k / asked.parts) for k in range(1, asked.parts)}
    for count in sorted(counts - {0, length}):
        saved_s = sum(candidates[i].save_s for i in members if candidates[i].uses)
        rest, fewer = (length - count) / length, list(candidates)
        changes: list[tuple[int, int]] = []
        for i in members:
            c = candidates[i]
            fewer[i] = replace(
                c,
                bytes=round(c.bytes * rest),
                remat_s=None if c.remat_s is None else c.remat_s * rest,
                offload_s=None if c.offload_s is None else c.offload_s * rest,
                save_s=c.save_s * rest,
            )
            if c.uses:
                waits = c.bytes - fewer[i].bytes
                changes += [(c.start, waits), (c.uses[-1] + 1, -waits)]
        known = asked.question.base
        base, at, held = [], 0, 0
        for time in sorted({t for t, _ in (*known, *changes)}):
            while at < len(known) and known[at][0] <= time:
                held = known[at][1]
                at += 1
            base.append((time, held + sum(n for t, n in changes if t <= time)))
        question = replace(asked.question, candidates=tuple(fewer), base=tuple(base))
        yield ((loop, count),), question, saved_s * count / length


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
      effort: limit of each search, see `solver.remat.model.choose`.
    """
    from rhino_jax.solver.remat.model import choose

    best: Chosen | None = None
    for first, question, saved_s in parted(asked):
        limit = int(min(budget_bytes, MUCH_BYTES))
        answer = choose(question, limit, effort=effort)
        one = answer and asked.chosen(SOME, answer, first, saved_s)
        if one and (best is None or one.answer.added_s < best.answer.added_s):
            best = one
            if not best.answer.added_s:
                break
    found = [best] if best is not None else []
    for name in POLICIES if best is None or best.answer.added_s else ():
        fits = (c for c in variants(asked, name) if c.answer.peak_bytes <= budget_bytes)
        cheapest = min(fits, key=lambda c: c.answer.added_s, default=None)
        found += [cheapest] if cheapest is not None else []
    found.sort(key=lambda c: c.answer.added_s)
    if not found or not str(found[0].choice):
        return []
    return [c for c in found if str(c.choice)]


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
