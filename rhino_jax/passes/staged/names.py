"""Keys of the values of a step, by their places in its programs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    def once(self) -> FlatRegion:
        """The program outside of the loop over micro-batches."""
        return _ops_of(self.apart.once)

    @cached_property
    def after(self) -> FlatRegion:
        """The ops of `once` that results of the step depend on."""
        once, apart = self.once, self.apart
        results = once.outputs[len(apart.entering) + len(apart.coupled) :]
        ops = sorted(once.needed(results)[0])
        return replace(once, outputs=results, ops=tuple(once.ops[i] for i in ops))

    @property
    def inputs(self) -> int:
        """Number of inputs of the step."""
        return len(self.once.inputs) - len(self.apart.leaving)

    def _given(self, key: ValueKey, aval: Any) -> ValueKey:
        self.types.setdefault(key, aval)
        return key

    def given(self, value: int) -> ValueKey:
        """Return the key of a value, by its id, that is read outside of the loop."""
        at = self.once.place.get(value)
        if at is None:
            return self.made_after(value)
        if at < self.inputs:
            return self._given(ValueKey(ValueKind.INPUT, at), self.once.avals[value])
        return self.left(at - self.inputs)

    def as_read(self, value: int, x: Any) -> Any:
        """Return the array of a value as it is read outside of the loop: accumulated
        outputs converted."""
        at = self.once.place.get(value, -1) - self.inputs
        dtype = self.once.avals[value].dtype
        return x if at < 0 else self.apart.finished(at, x, dtype)

    def entering(self, position: int) -> ValueKey:
        """Return the key of an input of micro-batches, by its position among these."""
        value, count = self.once.outputs[position], len(self.apart.entering)
        if position < count and value in self.once.place:
            return self.given(value)
        key = ValueKey(ValueKind.ENTERING, position)
        if position >= count:
            key = ValueKey(ValueKind.COUPLED, position - count)
        return self._given(key, self.once.avals[value])

    def inside(self, value: int) -> ValueKey:
        """Return the key of a value that a micro-batch reads or computes, by its id."""
        at, aval = self.piece.place.get(value), self.piece.avals[value]
        if at is None:
            return self._given(ValueKey(ValueKind.INSIDE, value), aval)
        if at == 0:
            return self._given(ValueKey(ValueKind.PIECE), aval)
        return self.entering(at - 1)

    def left(self, position: int) -> ValueKey:
        """Return the key of an accumulated output of all micro-batches."""
        return self._given(
            ValueKey(ValueKind.SUM, position), self.apart.sum_type(position)
        )

    def is_left(self, value: int) -> bool:
        """Whether a value outside of the loop is an accumulated output."""
        return self.once.place.get(value, -1) >= self.inputs

    def made_after(self, value: int) -> ValueKey:
        """Return the key of a value computed, or output converted, after the loop."""
        return self._given(ValueKey(ValueKind.AFTER, value), self.once.avals[value])

    def result(self, value: int) -> ValueKey:
        """Return the key of a result of the step."""
        return self.made_after(value) if self.is_left(value) else self.given(value)


@lru_cache(maxsize=8)
def _ops_of(closed: Any) -> FlatRegion:
    """Return `flat_region`; cached, as a step is cut into stages in many ways."""
    return flat_region(closed)
