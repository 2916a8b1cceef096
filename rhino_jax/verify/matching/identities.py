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

from rhino_jax.ir.collectives import (
    ALL_REDUCE,
    KINDS,
    PERMUTE,
    REDUCE_SCATTER,
    CollectiveKind,
    Pattern,
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
    for kind in KINDS.values():
        one = (IdentityTerm((kind.name, axes), kind.rounds * f),)
        if kind.parts:
            yield from _composed(kind, one, axes, f)
        elif kind.pattern is not Pattern.HOP:
            yield Identity(
                one,
                (IdentityTerm((PERMUTE, axes), f),),
                "decomposed",
                f"the {kind.name} runs as steps of collective-permute, beside the"
                " compute that uses its pieces",
            )


def _composed(
    kind: CollectiveKind, one: tuple[IdentityTerm, ...], axes: Axes, f: float
) -> Iterator[Identity]:
    """Yield identities between a kind and its parts, all over the same axes."""
    parts = tuple(IdentityTerm((part, axes), f) for part in kind.parts)
    first, last = kind.parts
    for planned, compiled, cause in (
        (parts, one, f"{first} and {last} became one {kind.name}: the same bytes"),
        (
            one,
            parts,
            f"the {kind.name} is made of a {first} and an {last}: the same bytes",
        ),
        (
            parts[:1],
            one,
            f"the same partial sum as an {kind.name}, of which each device keeps its"
            f" shard: twice the bytes of a {first}",
        ),
        (
            one,
            parts[:1],
            f"of the {kind.name} only the {first} is left: every device reads no more"
            " than its part",
        ),
    ):
        yield Identity(planned, compiled, "decomposed", cause)


def _over_two(
    a: Axes, b: Axes, joined: Axes, sizes: Mapping[str, int]
) -> Iterator[Identity]:
    """Yield identities between collectives over A, over B, and over both."""
    f_a, f_b, f_ab = (_cut(x, sizes) for x in (a, b, joined))
    n_a, n_b = _count(a, sizes), _count(b, sizes)
    named = f"{_text(a)} and {_text(b)}"
    one = f"one over {_text(joined)} in place of one over {named}"
    many = f"one over {named} in place of one over {_text(joined)}"

    def term(kind: str, axes: Axes, share: float) -> IdentityTerm:
        return IdentityTerm((kind, axes), share)

    for kind in KINDS.values():
        name = kind.name
        whole = (term(name, joined, kind.rounds * f_ab),)
        if kind.parts:
            first, last = kind.parts
            scatter, gather = term(first, a, f_a), term(last, a, f_a)
            parts = (scatter, term(name, b, kind.rounds * f_b / n_a))
            yield Identity((*parts, gather), whole, "over other axes", one)
            yield Identity(whole, (*parts, gather), "over other axes", many)
            kept = ", of which each device keeps its shard"
            yield Identity(parts, whole, "over other axes", one + kept)
            if a < b:
                plain = (
                    term(name, a, kind.rounds * f_a),
                    term(name, b, kind.rounds * f_b),
                )
                yield Identity(plain, whole, "over other axes", one)
                yield Identity(whole, plain, "over other axes", many)
        elif kind.pattern is Pattern.RING:
            parts = (term(name, a, f_a / n_b), term(name, b, f_b))
            yield Identity(parts, whole, "over other axes", one)
            yield Identity(whole, parts, "over other axes", many)
            # The first of two successive collectives moves only its share f_a * f_b.
            yield Identity(
                (term(name, a, f_a * f_b),),
                (term(name, b, f_a * f_b),),
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
