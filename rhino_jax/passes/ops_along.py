"""Ops along layers: which dims of operands and results are over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rhino_jax.ir.factor import FactorKind, dim_of
from rhino_jax.ir.program import Op


@dataclass(frozen=True, slots=True)
class Stacked:
    """An op on a part of stacks, as on a stage's layers.

    Attributes:
      dims: for every operand the dim over layers; -1: it has none.
      results: likewise; -1: a reduction over layers, each stage's own.
      reducer: of that reduction; empty where there is none.
    """

    dims: tuple[int, ...]
    results: tuple[int, ...]
    reducer: str = ""

    def stacks_in(self, results: Sequence[int]) -> set[int]:
        """Return those of the results, value ids, whose dim 0 is over layers."""
        return {v for v, d in zip(results, self.results, strict=True) if d == 0}


def along(op: Op, dim: Sequence[int]) -> Stacked | None:
    """Return an op along a factor.

    None where that is not a dim of its own in all operands and results, or where
    results of parts are no parts of a reduction either.

    Args:
      op: the op.
      dim: factors of a dim of an operand or result, of which there has to be one.
    """
    rule = op.rule
    if rule is None or len(dim) != 1:
        return None
    factor = rule.factors[dim[0]]
    dims = [dim_of(lay, dim[0]) for lay in (*rule.operands, *rule.results)]
    known, count = [d for d in dims if d is not None], len(rule.operands)
    is_free = factor.kind in (FactorKind.PARALLEL, FactorKind.REDUCE)
    is_reduced = -1 in known[count:]
    if len(known) < len(dims) or not is_free or (is_reduced and not factor.reducer):
        return None
    reducer = str(factor.reducer) if is_reduced else ""
    return Stacked(tuple(known[:count]), tuple(known[count:]), reducer)
