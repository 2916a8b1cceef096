"""Rules built dim by dim, for ops whose parameters determine where factors appear."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from rhino_jax.frontend.registry import OpContext
from rhino_jax.ir.factor import Dim, Factor, FactorKind, Rule
from rhino_jax.ir.op import item_bytes


_NARROW = 4
"""A part is narrow if it is no more than a quarter of a dim. Larger parts are usually
adjacent (halves of rotary embeddings, thirds of a fused projection), and an op that
reads them all gathers once."""


class FactorList:
    """The factors of one op, while its rule is built.

    Every method adds one factor and returns the dim that consists of it alone. A dim of
    size one gets no factor: it can never be sharded.
    """

    def __init__(self) -> None:
        self._factors: list[Factor] = []

    def parallel(self, size: int) -> Dim:
        """Add a factor that some result contains."""
        return self._add(size, FactorKind.PARALLEL)

    def whole(self, size: int) -> Dim:
        """Add a factor that must not be sharded."""
        return self._add(size, FactorKind.WHOLE)

    def dims(self, sizes: Sequence[int], whole: Collection[int] = ()) -> list[Dim]:
        """Add a factor for each dim: parallel, except for the positions in `whole`."""
        return [
            self.whole(size) if d in whole else self.parallel(size)
            for d, size in enumerate(sizes)
        ]

    def same(self, size: int) -> tuple[Dim, Dim]:
        """Add a parallel factor that is a dim of two arrays."""
        return (self.parallel(size),) * 2

    def pairs(
        self,
        sizes: Sequence[int],
        lengths: Sequence[int],
        add: Callable[[int, int, int], tuple[Dim, Dim]],
    ) -> tuple[list[Dim], list[Dim]]:
        """Add the factors of two arrays of as many dims, and return the dims of both.

        Args:
          sizes, lengths: sizes of their dims.
          add: (position, size, length) → the dims of both at this position.
        """
        each = enumerate(zip(sizes, lengths, strict=True))
        found = [add(d, *both) for d, both in each]
        return [a for a, _ in found], [b for _, b in found]

    def reduce(self, size: int, reducer: str = "sum") -> Dim:
        """Add a factor that is reduced."""
        return self._add(size, FactorKind.REDUCE, reducer=reducer)

    def index(self, size: int, reducer: str | None = None) -> Dim:
        """Add a factor that is addressed by indices."""
        return self._add(size, FactorKind.INDEX, reducer=reducer)

    def halo(self, size: int, lower: int, upper: int) -> Dim:
        """Add a factor that a window slides over; `size` is the result's."""
        return self._add(size, FactorKind.HALO, halo=(lower, upper))

    def moved(
        self,
        length: int,
        size: int,
        start: int,
        stride: int = 1,
        dilation: int = 1,
        *,
        can_sum: bool = True,
    ) -> tuple[Dim, Dim]:
        """Add the factors of a dim whose elements an op moves along it.

        Where most of either dim is in the other one, it is a shift: neighbours exchange
        borders. Of a narrow part, each shard contributes the elements that it holds.
        Everything else is whole: it would need a permutation of shards.

        Args:
          length: size of the result's dim.
          size: size of the operand's dim.
          start: position in the operand of the result's first element; negative where
            others come before it.
          stride, dilation: steps of the result's and of the operand's elements, as in
            `Factor`; `start` is a position among the dilated elements.
          can_sum: whether a shard's elements can be summed with zeros of other shards.

        Returns:
          The dim of the operand, and that of the result.
        """
        there, here = size * dilation, length * stride
        shared = min(there, start + here) - max(start, 0)
        if start == 0 and size == length and stride == dilation == 1:
            return self.same(size)
        # XLA's partitioner aborts where dilated elements are left out at the start, and
        # is wrong where the operand is whole, as of a single element, and the result
        # sharded.
        can_dilate = start <= 0 and size > 1
        if 2 * shared > max(there, here) and (can_dilate or dilation == 1):
            lower = max(-start, 0) // dilation
            upper = max((start + dilation - stride) // dilation, 0)
            same = self._add(
                length,
                FactorKind.HALO,
                halo=(lower, upper),
                slides_over=int(size),
                shift=start,
                stride=stride,
                dilation=dilation,
            )
            return same, same
        if stride != 1 or dilation != 1:
            return self.whole(size), self.whole(length)
        if can_sum and _NARROW * length <= size and 0 <= start <= size - length:
            return self.index(size, "sum"), ()
        if _NARROW * size <= length and shared == size:
            return (), self.parallel(length)
        return self.whole(size), self.whole(length)

    def merge(self, size: int, items: int, dtypes: Sequence[str]) -> Dim:
        """Add a factor whose shards send results of their own, to be merged.

        Args:
          size: size of the dim.
          items: number of elements of each array that a shard sends.
          dtypes: element types of these arrays.
        """
        sent = tuple(map(item_bytes, dtypes))
        return self._add(size, FactorKind.MERGE, sent_items=items, sent_item_bytes=sent)

    def _add(self, size: int, kind: FactorKind, **facts: Any) -> Dim:
        if size == 1:
            return ()
        name = factor_name(len(self._factors))
        self._factors.append(Factor(name, int(size), kind, **facts))
        return (len(self._factors) - 1,)

    def rule(
        self, operands: Sequence[Sequence[Dim]], results: Sequence[Sequence[Dim]]
    ) -> Rule:
        """Return the rule with these layouts."""
        sides = (tuple(map(tuple, layouts)) for layouts in (operands, results))
        return Rule(tuple(self._factors), *sides)


def factor_name(position: int) -> str:
    """Return the name of a factor: `a` … `z`, then `a1` … `z1`, and so on."""
    turn, letter = divmod(position, 26)
    return chr(ord("a") + letter) + (str(turn) if turn else "")


def along(
    ctx: OpContext,
    axes: Collection[int],
    special: Callable[[FactorList, int], Dim] = FactorList.whole,
) -> Rule:
    """Return the rule of an op whose operands and results share all dims, of which
    some may lack those in `axes`: these are special, the others parallel.

    Args:
      ctx: the op; scalars among its operands are parameters.
      axes: positions of the special dims.
      special: adds the factor of such a dim, given its size.
    """
    factors, shapes = FactorList(), (*ctx.in_shapes, *ctx.out_shapes)
    whole = max(shapes, key=len)
    dims = [
        special(factors, size) if d in axes else factors.parallel(size)
        for d, size in enumerate(whole)
    ]
    left = [dim for d, dim in enumerate(dims) if d not in axes]
    layouts = [dims if len(s) == len(whole) else left if s else [] for s in shapes]
    count = len(ctx.in_shapes)
    return factors.rule(layouts[:count], layouts[count:])


def dimwise(
    ctx: OpContext, add: Callable[[FactorList, int, int, int], tuple[Dim, Dim]]
) -> Rule:
    """Return the rule of an op whose results have the dims of its operands, one by one.

    Args:
      ctx: the op; scalars among its operands are parameters.
      add: (factors, position, size in the operands, size in the results) → the dims of
        operands and results at this position.
    """
    factors = FactorList()
    read, made = factors.pairs(
        ctx.in_shapes[0], ctx.out_shapes[0], partial(add, factors)
    )
    operands = [read if shape else [] for shape in ctx.in_shapes]
    return factors.rule(operands, [made] * len(ctx.out_shapes))
