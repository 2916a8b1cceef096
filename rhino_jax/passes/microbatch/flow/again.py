"""Sums over the batch that `jax.checkpoint` makes again, found in the forward pass.

A region that is recomputed is taken apart where something in it needs the whole batch.
Were its sums made a second time, the forward pass up to them would have to run before
all micro-batches meet, a second time as well: they are read from the first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

from rhino_jax.passes.microbatch.flow.analysis import FlowResult
from rhino_jax.passes.microbatch.flow.blocks import Flat, Item
from rhino_jax.passes.microbatch.flow.states import Partial, RowsState


def made_again(found: FlowResult, opened: Collection[int]) -> dict[int, int]:
    """Sums over rows that equal earlier ones: value → the first of its kind.

    Args:
      found: the analysis of a program.
      opened: recomputed regions that are taken apart in it.
    """
    if not opened:
        return {}
    first = _Numbers(found.flat).first
    return {
        value: first[value]
        for item in found.flat.top.items
        if any(isinstance(found.states[v], RowsState) for v in item.operands)
        for value in item.results
        if isinstance(found.states[value], Partial) and first[value] != value
    }


class _Numbers:
    """Value numbering (Cocke 1970): ops that do the same to equal operands make equal
    values.

    Attributes:
      first: of every value made in a program's body, the first that equals it.
    """

    def __init__(self, flat: Flat) -> None:
        self.first: dict[int, int] = {}
        self._consts = {v: _const(x) for v, x in flat.consts.items()}
        known: dict[Hashable, tuple[int, ...]] = {}
        for item in flat.top.items:
            results = known.setdefault(self._key(item), item.results)
            self.first.update(zip(item.results, results, strict=True))

    def _key(self, item: Item) -> Hashable:
        if item.eqn.effects:
            return item.op.id
        operands = (self._consts.get(v) or self.first.get(v, v) for v in item.operands)
        params = sorted((name, str(x)) for name, x in item.eqn.params.items())
        return item.op.name, tuple(params), tuple(operands)


def _const(x: Any) -> Hashable:
    is_scalar = getattr(x, "shape", ()) == ()
    return (str(getattr(x, "dtype", type(x))), repr(x)) if is_scalar else ("", id(x))
