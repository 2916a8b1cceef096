"""A part of a program that is cut alone, all else being done in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rhino_jax.passes.microbatch.flow.ops import in_full
from rhino_jax.passes.microbatch.flow.states import (
    RowsState,
    State,
    WholeState,
    is_outside,
)


if TYPE_CHECKING:
    from rhino_jax.passes.microbatch.flow.blocks import Item


@dataclass(frozen=True, slots=True)
class DimPart:
    """Attributes:
    ops: ids of the ops that may run in a loop.
    seeds: op → operand → where a piece has its rows of it, though it is made in full.
    """

    ops: frozenset[int]
    seeds: Mapping[int, Mapping[int, RowsState]]

    def reads(self, item: Item, states: list[State]) -> list[State]:
        """The states of an op's operands as it reads them."""
        if item.op.id not in self.ops:
            return [s if is_outside(s) else in_full(s) for s in states]
        found = list(states)
        for i, rows in self.seeds.get(item.op.id, {}).items():
            state = states[i]
            if isinstance(state, WholeState) and is_outside(state):
                found[i] = RowsState(*rows.place, phase=state.phase)
        return found
