"""What is asked of the engine, and what it is about."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from rhino_jax.ir.program import Op
from rhino_jax.solver.remat.question import Question, SavedValue


class RerunWork(IntEnum):
    """The most that ops which run again do: no product, products of which every one has
    a batch, as attention's scores, others, as those of weights, or whole loops."""

    SMALL = 0
    BATCHED = 1
    PRODUCT = 2
    LOOP = 3

    @classmethod
    def of(cls, op: Op) -> RerunWork:
        """Of one op, whatever is in its regions."""
        if op.call is not None and op.call.trip_count > 1:
            return cls.LOOP
        if not op.traits.is_contraction or op.rule is None:
            return cls.SMALL
        layouts = (*op.rule.operands, *op.rule.results)
        factors = [{f for dim in layout for f in dim} for layout in layouts]
        return cls.BATCHED if set.intersection(*factors) else cls.PRODUCT


@dataclass(frozen=True, slots=True)
class RematQuestion:
    """A question of the engine, and what it is about.

    Attributes:
      question: what may wait, and what else memory holds.
      values: of every candidate the value id: of a stack that of the loop's result, of
        what would have to be stacked that of the loop's body.
      loops: forward loop → (how often it runs, candidates that it stacks).
      together_s: of values that are made again and of those that are, seconds: what
        several are made of is counted once, where candidates each count it.
      work: of every candidate, what making it again repeats: see `RerunWork`.
      followers: value that is kept but never stored, as compilers make it where it is
        read → candidates that it is made of.
    """

    question: Question
    values: tuple[int, ...]
    loops: Mapping[int, tuple[int, tuple[int, ...]]]
    followers: Mapping[int, tuple[int, ...]]
    work: tuple[RerunWork, ...]
    together_s: Callable[[Collection[int], Collection[int]], float]


@dataclass(frozen=True, slots=True)
class RematRow:
    """A candidate that names values where candidates name each other by position."""

    place: tuple[int, int]
    value: int
    bytes: int
    start: int
    uses: tuple[int, ...]
    needs: tuple[int, ...]
    remake_s: float | None
    offload_s: float | None
    remade_bytes: int | None
    like: int | None = None
    layer: int = 0
    keep_s: float = 0.0
    work: RerunWork = RerunWork.SMALL
    link_s: float = 0.0

    def candidate(self, index: Mapping[int, int]) -> SavedValue:
        needs = sorted({index[v] for v in self.needs if v in index})
        return SavedValue(
            self.bytes, self.start, self.uses, tuple(needs), self.remake_s,
            self.offload_s, 0, self.remade_bytes, self.like, self.layer, self.keep_s,
            link_s=self.link_s,
        )  # fmt: skip
