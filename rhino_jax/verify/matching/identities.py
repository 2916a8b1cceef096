"""Identities between collectives: equivalent decompositions that compilers choose.

An identity says that one group of collectives leaves every device with the same data as
another. Its terms carry wire bytes per byte of the array that is reduced, gathered or
exchanged, so that bytes of one side determine those of the other. Over n devices a
reduce-scatter, all-gather or all-to-all puts f = (n-1)/n of the array on the wire, an
all-reduce 2 f, and over two groups of axes A and B:

    all-reduce(A B) = reduce-scatter(A), all-reduce(B) of 1/A, all-gather(A)
    all-gather(A B) = all-gather(A) of 1/B, all-gather(B)

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
Operations in MPICH" (IJHPCA 2005), section 4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rhino_jax.cost.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
)
from rhino_jax.verify.matching.ledger import Key


Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IdentityTerm:
    """One collective of an identity.

    Attributes:
      key: kind and axes.
      share: bytes on the wire per byte of the identity's array.
    """

    key: Key
    share: float


@dataclass(frozen=True, slots=True)
class Identity:
    """Planned collectives, and the compiled collectives that may replace them.

    Attributes:
      planned, compiled: terms of the two sides.
      label: the kind of change, a word or two.
      cause: explanation of the change, as a sentence.
      needs_all: whether a match across different source lines is accepted only where it
        explains all remaining bytes of both sides: equal bytes alone are weak evidence.
    """

    planned: tuple[IdentityTerm, ...]
    compiled: tuple[IdentityTerm, ...]
    label: str
    cause: str
    needs_all: bool = False

    def fits(self, planned: Collection[Key], compiled: Collection[Key]) -> bool:
        """Whether all terms occur on their side."""
        return all(t.key in planned for t in self.planned) and all(
            t.key in compiled for t in self.compiled
        )

    @property
    def drops_scatter(self) -> bool:
        """Whether a reduce-scatter becomes an all-reduce, which moves more."""
        kinds = {t.key[0] for t in self.compiled}
        return ALL_REDUCE in kinds and REDUCE_SCATTER not in kinds and self.grows

    @property
    def grows(self) -> bool:
        """Whether the compiled side moves more."""
        planned, compiled = _sum(self.planned), _sum(self.compiled)
        return compiled > planned * (1 + 1e-9)


def identities(keys: Iterable[Key], sizes: Mapping[str, int]) -> tuple[Identity, ...]:
    """Return the identities over the axes that occur, one group of axes first.

    Args:
      keys: kinds and axes that occur on either side.
      sizes: mesh axis sizes, major first.
    """
    order = list(sizes)
    groups = sorted({axes for _, axes in keys if axes})
    found: list[Identity] = []
    for axes in groups:
        found += _over_one(axes, sizes)
    # The two sides may run over different combinations of the same axes.
    for a, b in itertools.permutations(groups, 2):
        if not set(a) & set(b):
            joined = tuple(sorted((*a, *b), key=order.index))
            found += _over_two(a, b, joined, sizes)
    return tuple(found)


def _over_one(axes: Axes, sizes: Mapping[str, int]) -> Iterator[Identity]:
    f = _cut(axes, sizes)
    reduce_ = IdentityTerm((ALL_REDUCE, axes), 2 * f)
    scatter, gather = (
        IdentityTerm((REDUCE_SCATTER, axes), f),
        IdentityTerm((ALL_GATHER, axes), f),
    )
    yield Identity(
        (scatter, gather),
        (reduce_,),
        "decomposed",
        "reduce-scatter and all-gather became one all-reduce: the same bytes",
    )
    yield Identity(
        (reduce_,),
        (scatter, gather),
        "decomposed",
        "the all-reduce is made of a reduce-scatter and an all-gather: the same bytes",
    )
    yield Identity(
        (scatter,),
        (reduce_,),
        "decomposed",
        "the same partial sum as an all-reduce, of which each device keeps its shard:"
        " twice the bytes of a reduce-scatter",
    )
    yield Identity(
        (reduce_,),
        (scatter,),
        "decomposed",
        "of the all-reduce only the reduce-scatter is left: every device reads no more"
        " than its part",
    )
    for kind in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL):
        yield Identity(
            (IdentityTerm((kind, axes), f),),
            (IdentityTerm((PERMUTE, axes), f),),
            "decomposed",
            f"the {kind} runs as steps of collective-permute, beside the compute that"
            " uses its pieces",
        )


def _over_two(
    a: Axes, b: Axes, joined: Axes, sizes: Mapping[str, int]
) -> Iterator[Identity]:
    """Yield identities between collectives over A, over B, and over both."""
    f_a, f_b, f_ab = (_cut(x, sizes) for x in (a, b, joined))
    n_a, n_b = _count(a, sizes), _count(b, sizes)
    named = f"{_text(a)} and {_text(b)}"
    one = f"one over {_text(joined)} in place of one over {named}"
    many = f"one over {named} in place of one over {_text(joined)}"
    scatter_a = IdentityTerm((REDUCE_SCATTER, a), f_a)
    gather_a = IdentityTerm((ALL_GATHER, a), f_a)
    reduce_b = IdentityTerm((ALL_REDUCE, b), 2 * f_b / n_a)
    whole = IdentityTerm((ALL_REDUCE, joined), 2 * f_ab)
    plain = (
        IdentityTerm((ALL_REDUCE, a), 2 * f_a),
        IdentityTerm((ALL_REDUCE, b), 2 * f_b),
    )
    yield Identity((scatter_a, reduce_b, gather_a), (whole,), "over other axes", one)
    yield Identity((whole,), (scatter_a, reduce_b, gather_a), "over other axes", many)
    kept = ", of which each device keeps its shard"
    yield Identity((scatter_a, reduce_b), (whole,), "over other axes", one + kept)
    if a < b:
        yield Identity(plain, (whole,), "over other axes", one)
        yield Identity((whole,), plain, "over other axes", many)
    for kind in (ALL_GATHER, REDUCE_SCATTER):
        parts = (IdentityTerm((kind, a), f_a / n_b), IdentityTerm((kind, b), f_b))
        both = IdentityTerm((kind, joined), f_ab)
        yield Identity(parts, (both,), "over other axes", one)
        yield Identity((both,), parts, "over other axes", many)
        # The first of two successive collectives moves only its share f_a * f_b.
        moved = f_a * f_b
        yield Identity(
            (IdentityTerm((kind, a), moved),),
            (IdentityTerm((kind, b), moved),),
            "in another order",
            f"over {named} in another order: the same bytes",
            needs_all=True,
        )


def _cut(axes: Sequence[str], sizes: Mapping[str, int]) -> float:
    n = _count(axes, sizes)
    return (n - 1) / n


def _count(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[a] for a in axes)


def _sum(terms: Iterable[IdentityTerm]) -> float:
    return sum(t.share for t in terms)


def _text(axes: Sequence[str]) -> str:
    return " × ".join(axes)
