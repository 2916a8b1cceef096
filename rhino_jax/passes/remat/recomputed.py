"""Recomputed values: every op runs again at most once, when a result is first read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rhino_jax.passes.remat.rerun import Rerun
from rhino_jax.rewrite.flat import FlatProgram, FlatRegion, trace_back


class RematValues:
    """Values that are recomputed on first read.

    Args:
      flat: the program.
      block: the region whose ops run again.
      again: which of its ops.
      read: value id → array of a saved value.
      barred: arrays → the same arrays behind a barrier, so that they are not available
        before they are needed.
    """

    def __init__(
        self,
        flat: FlatProgram,
        block: FlatRegion,
        again: Rerun,
        read: Callable[[int], Any],
        barred: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> None:
        self.flat, self.block, self.again = flat, block, again
        self._read, self._barred = read, barred
        self._made: dict[int, Any] = {}
        self._lines = frozenset(again.lines)
        self._entered: dict[int, dict[int, Any]] = {}

    def value(self, value: int) -> Any:
        """Return a value, recomputed together with the values that it depends on."""
        if value not in self._made:
            lines, _ = trace_back([value], self._maker, self._reads)
            for line in sorted(lines):
                self._run(line)
        return self._made[value]

    def _maker(self, value: int) -> int | None:
        is_to_do = value in self.again.values and value not in self._made
        return self.block.maker[value] if is_to_do else None

    def _reads(self, position: int) -> tuple[int, ...]:
        return self.block.ops[position].operands

    def _run(self, position: int) -> None:
        line = self.block.ops[position]
        group = self.again.group[position]
        if group not in self._entered:
            inputs = self.again.inputs[group]
            # A group without inputs needs no barrier.
            arrays = [self._read(v) for v in inputs]
            barred = self._barred(arrays) if arrays else ()
            self._entered[group] = dict(zip(inputs, barred, strict=True))
        entered = self._entered[group]
        literals = self.flat.consts
        operands = [
            self._made[v]
            if v in self.again.values
            else literals[v]
            if v in literals
            else entered[v]
            for v in line.operands
        ]
        results = line.bind(operands)
        self._made.update(zip(line.results, results, strict=True))
