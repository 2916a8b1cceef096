"""Keys of the values of a step, by their places in its programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
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
        return _ops_of(self.apart.before)

    @cached_property
    def between(self) -> FlatRegion:
        return _ops_of(self.apart.between)

    @cached_property
    def after(self) -> FlatRegion:
        return _ops_of(self.apart.after)

    @property
    def inputs(self) -> int:
        """Number of inputs of the step."""
        return len(self.before.inputs)

    def _given(self, key: ValueKey, aval: Any) -> ValueKey:
        self.types.setdefault(key, aval)
        return key

    def given(self, region: FlatRegion, value: int) -> ValueKey:
        """Return the key of a value that is read before, between or after the loop.

        Args:
          region: the program before, between or after it.
          value: its id there.
        """
        at = region.place.get(value)
        if at is None:
            return self.made_after(value)
        if at < self.inputs:
            return self._given(ValueKey(ValueKind.INPUT, at), region.avals[value])
        return self.left(at - self.inputs)

    def as_read(self, region: FlatRegion, value: int, x: Any) -> Any:
        """Return the array of a value as it is read: accumulated outputs converted.

        Args:
          region, value: as of `given`.
          x: the array.
        """
        at = region.place.get(value, -1) - self.inputs
        return x if at < 0 else self.apart.finished(at, x, region.avals[value].dtype)

    def entering(self, position: int) -> ValueKey:
        """Return the key of an input of micro-batches, by its position among these."""
        value = self.before.outputs[position]
        if value in self.before.place:
            return self.given(self.before, value)
        aval = self.before.avals[value]
        return self._given(ValueKey(ValueKind.ENTERING, position), aval)

    def inside(self, value: int) -> ValueKey:
        """Return the key of a value that a micro-batch reads or computes, by its id."""
        at, aval = self.piece.place.get(value), self.piece.avals[value]
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
        return self.after.place.get(value, -1) >= self.inputs

    def made_after(self, value: int) -> ValueKey:
        """Return the key of a value computed, or output converted, after the loop."""
        return self._given(ValueKey(ValueKind.AFTER, value), self.after.avals[value])

    def result(self, value: int) -> ValueKey:
        """Return the key of a result of the step."""
        is_left = self.is_left(value)
        return self.made_after(value) if is_left else self.given(self.after, value)


@lru_cache(maxsize=8)
def _ops_of(closed: Any) -> FlatRegion:
    """Return `flat_region`; cached, as a step is cut into stages in many ways."""
    return flat_region(closed)
