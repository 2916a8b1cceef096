"""Sums over the batch that `jax.checkpoint` recomputes, and their first computation.

A recomputed region is inlined where an op in it needs the whole batch. If its sums were
recomputed, the forward pass up to them would have to run a second time in a loop of its
own: they are read from the first run instead.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

from rhino_jax.passes.microbatch.flow.analysis import FlowResult
from rhino_jax.passes.microbatch.flow.blocks import Flat, Item
from rhino_jax.passes.microbatch.flow.states import Partial, RowsState


def made_again(found: FlowResult, opened: Collection[int]) -> dict[int, int]:
    """Return sums over rows that equal earlier ones: value id → the first equal value.

    Args:
      found: the analysis of a program.
      opened: ids of the recomputed regions that are inlined in it.
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
    """Value numbering (Cocke 1970): equal ops on equal operands compute equal values.

    Attributes:
      first: id of each value computed in a program's body → the first value equal to
        it.
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
    """Return a hashable key: of a scalar its value, of an array its identity."""
    is_scalar = getattr(x, "shape", ()) == ()
    return (str(getattr(x, "dtype", type(x))), repr(x)) if is_scalar else ("", id(x))
