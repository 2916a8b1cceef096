"""Remat problems with the value ids of their candidates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from rhino_jax.ir.program import Op
from rhino_jax.solver.remat.question import Question, SavedValue


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
        layouts = (*op.rule.operands, *op.rule.results)
        factors = [{f for dim in layout for f in dim} for layout in layouts]
        return cls.BATCHED if set.intersection(*factors) else cls.PRODUCT


@dataclass(frozen=True, slots=True)
class RematQuestion:
    """A remat problem, and the values that it is about.

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
    """

    question: Question
    values: tuple[int, ...]
    sources: frozenset[int]
    loops: Mapping[int, tuple[int, tuple[int, ...]]]
    followers: Mapping[int, tuple[int, ...]]
    work: tuple[RerunWork, ...]
    together_s: Callable[[Collection[int], Collection[int]], float]


@dataclass(frozen=True, slots=True)
class RematRow:
    """A candidate for rematerialization that refers to values by id.

    See `SavedValue`, which refers to positions of candidates, for other attributes.

    Attributes:
      place: (top-level equation, 1 + equation of the loop's body, or 0), for order.
      value: the value's id.
      needs: ids of the values that recomputing it reads.
      work: the work that recomputing it repeats.
      makes: ids of all values that recomputing it computes.
    """

    place: tuple[int, int]
    value: int
    bytes: int
    start: int
    uses: tuple[int, ...]
    needs: tuple[int, ...]
    remat_s: float | None
    offload_s: float | None
    remat_bytes: int | None
    like: int | None = None
    layer: int = 0
    save_s: float = 0.0
    work: RerunWork = RerunWork.SMALL
    link_s: float = 0.0
    makes: frozenset[int] = frozenset()

    def candidate(self, index: Mapping[int, int]) -> SavedValue:
        """Return the candidate, with value ids mapped to positions by `index`."""
        needs = sorted({index[v] for v in self.needs if v in index})
        return SavedValue(
            self.bytes, self.start, self.uses, tuple(needs), self.remat_s,
            self.offload_s, 0, self.remat_bytes, self.like, self.layer, self.save_s,
            link_s=self.link_s,
        )  # fmt: skip
