"""Building a rule dim by dim, for ops whose parameters say where factors appear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.ir.factor import Dim, Factor, FactorKind, Layout, Rule
from rhino_jax.ir.op import item_bytes


_NARROW = 4
"""A part is narrow that is no more than a quarter of a dim. Larger parts lie side by
side as a rule (halves of rotary embeddings, thirds of a fused projection), and what
reads them all gathers once."""


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
        return self._add(size, FactorKind.HALO, halo=(lower, upper))

    def moved(
        self, length: int, size: int, start: int, can_sum: bool = True
    ) -> tuple[Dim, Dim]:
        """Add the factors of a dim whose elements an op moves along it.

        Where most of either dim is in the other one, it is a shift: neighbours exchange
        borders. Of a narrow part each shard answers for what it has. All else is whole:
        its shards would trade places.

        Args:
          length: of the result's dim.
          size: of the operand's dim.
          start: the element of the operand that is the result's first; negative where
            others come before it.
          can_sum: whether zeros of other shards can be added to what one shard has.
        Returns:
          The dim of the operand, and that of the result.
        """
        shared = min(size, start + length) - max(start, 0)
        if start == 0 and size == length:
            same = self.parallel(size)
            return same, same
        if 2 * shared > max(size, length):
            same = self._add(length, FactorKind.HALO, None, start, int(size))
            return same, same
        if can_sum and _NARROW * length <= size and 0 <= start <= size - length:
            return self.index(size, "sum"), ()
        if _NARROW * size <= length and shared == size:
            return (), self.parallel(length)
        return self.whole(size), self.whole(length)

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
        shift: int | None = None,
        slides_over: int | None = None,
        halo: tuple[int, int] = (0, 0),
    ) -> Dim:
        if size == 1:
            return ()
        name = factor_name(len(self._factors))
        if shift is not None:
            halo = max(-shift, 0), max(shift, 0)
        self._factors.append(
            Factor(
                name,
                int(size),
                kind,
                reducer,
                halo,
                slides_over=slides_over,
                shift=shift,
            )
        )
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
