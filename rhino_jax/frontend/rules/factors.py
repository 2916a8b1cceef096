"""Building a rule dim by dim, for ops whose parameters say where factors appear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.ir.factor import Dim, Factor, FactorKind, Layout, Rule
from rhino_jax.ir.op import item_bytes


class FactorList:
    """The factors of one op, while its rule is written.

    Every method adds one factor and returns the dim that is made of it alone. A
    dim of size one gets no factor: it can never be cut.
    """

    def __init__(self) -> None:
        self._factors: list[Factor] = []

    def parallel(self, size: int) -> Dim:
        """A factor that some result contains."""
        return self._add(size, FactorKind.PARALLEL)

    def whole(self, size: int) -> Dim:
        """A factor that must not be cut."""
        return self._add(size, FactorKind.WHOLE)

    def reduce(self, size: int, reducer: str = "sum") -> Dim:
        """A factor that is combined away."""
        return self._add(size, FactorKind.REDUCE, reducer)

    def index(self, size: int, reducer: str | None = None) -> Dim:
        """A factor that is addressed by indices."""
        return self._add(size, FactorKind.INDEX, reducer)

    def halo(self, size: int, lower: int, upper: int) -> Dim:
        """A factor that a window slides over; `size` is the result's."""
        return self._add(size, FactorKind.HALO, None, (lower, upper))

    def merge(self, size: int, items: int, dtypes: Sequence[str]) -> Dim:
        """A factor of which shards send results of their own, to be merged: so many
        elements of arrays of these types."""
        dim = self._add(size, FactorKind.MERGE)
        sent = tuple(map(item_bytes, dtypes))
        for f in dim:
            self._factors[f] = replace(
                self._factors[f], sent_items=items, sent_item_bytes=sent
            )
        return dim

    def _add(
        self,
        size: int,
        kind: FactorKind,
        reducer: str | None = None,
        halo: tuple[int, int] = (0, 0),
    ) -> Dim:
        if size == 1:
            return ()
        name = factor_name(len(self._factors))
        self._factors.append(Factor(name, int(size), kind, reducer, halo))
        return (len(self._factors) - 1,)

    def rule(
        self, operands: Sequence[Sequence[Dim]], results: Sequence[Sequence[Dim]]
    ) -> Rule:
        """The rule with these layouts."""
        return Rule(tuple(self._factors), _freeze(operands), _freeze(results))


def _freeze(layouts: Sequence[Sequence[Dim]]) -> tuple[Layout, ...]:
    return tuple(tuple(layout) for layout in layouts)


def factor_name(position: int) -> str:
    """`a` … `z`, then `a1` … `z1`, and so on."""
    turn, letter = divmod(position, 26)
    return chr(ord("a") + letter) + (str(turn) if turn else "")
