"""A subset of a program's ops that alone runs in a loop; all other ops run in full."""

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
    from rhino_jax.ir.axes import AxisSpan
    from rhino_jax.rewrite.flat import FlatOp


@dataclass(frozen=True, slots=True)
class DimPart:
    """Ops of a program that may run in a loop, and the operands that they slice.

    Attributes:
      ops: ids of the ops that may run in a loop.
      seeds: op id → operand position → the dim by which the loop slices that operand,
        although it is known in full.
    """

    ops: frozenset[int]
    seeds: Mapping[int, Mapping[int, AxisSpan]]

    def reads(self, item: FlatOp, states: list[State]) -> list[State]:
        """Return the states in which an op reads its operands.

        Args:
          item: the op.
          states: states of its operands in the program.
        """
        if item.op.id not in self.ops:
            return [s if is_outside(s) else in_full(s) for s in states]
        found = list(states)
        for i, span in self.seeds.get(item.op.id, {}).items():
            state = states[i]
            if isinstance(state, WholeState) and is_outside(state):
                found[i] = RowsState(span, phase=state.phase)
        return found
