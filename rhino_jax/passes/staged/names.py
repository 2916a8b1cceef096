"""Keys of the values of a step, by their places in its programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.step import ValueKey, ValueKind
from rhino_jax.rewrite.flat import FlatRegion
from rhino_jax.rewrite.flatten import flat_region


@dataclass(frozen=True, eq=False)
class ValueNames:
    """Keys of the values of a step, and their types.

    Attributes:
      apart: the step.
      piece: equations of a micro-batch.
      types: abstract values of the keys that were handed out.
    """

    apart: Apart
    piece: FlatRegion
    types: dict[ValueKey, Any] = field(default_factory=dict)

    @cached_property
    def before(self) -> FlatRegion:
        return flat_region(self.apart.before)

    @cached_property
    def between(self) -> FlatRegion:
        return flat_region(self.apart.between)

    @cached_property
    def after(self) -> FlatRegion:
        return flat_region(self.apart.after)

    @property
    def inputs(self) -> int:
        """Number of inputs of the step."""
        return len(self.before.inputs)

    def _given(self, key: ValueKey, aval: Any) -> ValueKey:
        self.types.setdefault(key, aval)
        return key

    @cached_property
    def _of_before(self) -> dict[int, int]:
        return {v: i for i, v in enumerate(self.before.inputs)}

    @cached_property
    def of_piece(self) -> dict[int, int]:
        """Value → its position among the inputs of a micro-batch."""
        return {v: i for i, v in enumerate(self.piece.inputs)}

    @cached_property
    def of_after(self) -> dict[int, int]:
        """Value → its position among the inputs of the program after the loop."""
        return {v: i for i, v in enumerate(self.after.inputs)}

    def step_input(self, value: int) -> ValueKey:
        """Return the key of a step input, by its id in the program before the loop."""
        return self._given(
            ValueKey(ValueKind.INPUT, self._of_before[value]), self.before.avals[value]
        )

    def is_made_before(self, position: int) -> bool:
        """Whether the input of micro-batches at a position is no input of the step."""
        return self.before.outputs[position] not in self._of_before

    def entering(self, position: int) -> ValueKey:
        """Return the key of an input of micro-batches, by its position among these."""
        value = self.before.outputs[position]
        if value in self._of_before:
            return self.step_input(value)
        aval = self.before.avals[value]
        return self._given(ValueKey(ValueKind.ENTERING, position), aval)

    def inside(self, value: int) -> ValueKey:
        """Return the key of a value that a micro-batch reads or computes, by its id."""
        at, aval = self.of_piece.get(value), self.piece.avals[value]
        if at is None:
            return self._given(ValueKey(ValueKind.INSIDE, value), aval)
        if at == 0:
            return self._given(ValueKey(ValueKind.PIECE), aval)
        coupled = at - 1 - len(self.apart.entering)
        return self.entering(at - 1) if coupled < 0 else self.coupled(coupled)

    def coupled(self, position: int) -> ValueKey:
        """Return the key of a value computed between forward and backward passes."""
        aval = self.between.avals[self.between.outputs[position]]
        return self._given(ValueKey(ValueKind.COUPLED, position), aval)

    def left(self, position: int) -> ValueKey:
        """Return the key of an accumulated output of all micro-batches."""
        return self._given(
            ValueKey(ValueKind.SUM, position), self.apart.sum_type(position)
        )

    def is_left(self, value: int) -> bool:
        """Whether a value of the program after the loop is an accumulated output."""
        return self.of_after.get(value, -1) >= self.inputs

    def read_after(self, value: int) -> ValueKey:
        """Return the key of a value that is read after the loop, by its id."""
        at = self.of_after.get(value)
        if at is None:
            return self.made_after(value)
        if at < self.inputs:
            return self._given(ValueKey(ValueKind.INPUT, at), self.after.avals[value])
        return self.left(at - self.inputs)

    def made_after(self, value: int) -> ValueKey:
        """Return the key of a value computed, or output converted, after the loop."""
        return self._given(ValueKey(ValueKind.AFTER, value), self.after.avals[value])

    def result(self, value: int) -> ValueKey:
        """Return the key of a result of the step."""
        return self.made_after(value) if self.is_left(value) else self.read_after(value)
