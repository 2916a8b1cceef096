"""Remat problems with the value ids of their candidates, and answers to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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

    def chosen(self, name: str, answer: RematAnswer, first: Slices = ()) -> Chosen:
        """Return an answer as a choice for the pass "recompute".

        Args:
          name: see `Chosen`.
          answer: the answer.
          first: the slices that are saved.
        """
        chosen = list(zip(self.values, answer.choices, strict=True))
        gone = {i for i, (_, what) in enumerate(chosen) if what == REMAT}
        remat = [v for v, what in chosen if what == REMAT]
        remat += [v for v, of in self.followers.items() if not gone.isdisjoint(of)]
        sent = [v for v, what in chosen if what == OFFLOAD]
        needed = {n for i in gone for n in self.question.candidates[i].needs}
        needed |= {
            n for of in self.followers.values() if not gone.isdisjoint(of) for n in of
        }
        kept = [
            v
            for i, ((v, what), c) in enumerate(
                zip(chosen, self.question.candidates, strict=True)
            )
            if what == SAVE and (not c.uses or (v in self.sources and i in needed))
        ]
        choice = RematChoice(
            tuple(remat),
            tuple(kept),
            tuple(sent),
            first if gone else (),
            ordered=self.is_ordered and bool(remat),
        )
        return Chosen(name, choice, answer)


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
