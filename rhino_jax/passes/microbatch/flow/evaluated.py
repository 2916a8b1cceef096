"""Values computed from the positions of rows, or from the keys of a sort, alone.

They are evaluated on the host, for a few rows of the batch; see `orders`.

And values of which micro-batches compute slices: positions, random bits, broadcasts.
They are complete in the program, but a slice of them needs no slicing of an operand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from rhino_jax.frontend.registry import part_of
from rhino_jax.ir.axes import AxisSpan, FactorSpan, crossings, locate, place
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.microbatch.flow.ops import Ran
from rhino_jax.passes.microbatch.flow.states import RowsState, State
from rhino_jax.rewrite.emit import bind_local
from rhino_jax.rewrite.flat import FlatOp, FlatProgram


UPDATING = frozenset({
    OpKind.ELEMENTWISE, OpKind.EXPONENTIAL, OpKind.CONVERSION, OpKind.IDENTITY,
    OpKind.BROADCAST,
})  # fmt: skip
"""Kinds of ops that an optimizer applies to a complete gradient."""

RECOMPUTED_KINDS = UPDATING | {OpKind.MOVEMENT}
"""Kinds of ops that are recomputed for each micro-batch, rather than sliced."""


def spot_of(item: FlatOp, value: int, span: AxisSpan) -> FactorSpan | None:
    """Return the position of the batch in an op's factors, given one of its results.

    Args:
      item: the op.
      value: id of the result.
      span: the dim of it that holds the batch.
    Returns:
      None where the op cannot compute the rows of a micro-batch alone.
    """
    rule = item.op.rule
    if rule is None or item.regions:
        return None
    layout = rule.results[item.results.index(value)]
    spot = locate(rule, layout, span)
    if spot is None or rule.factors[spot.factor].kind is not FactorKind.PARALLEL:
        return None
    return spot


def operands_cut(
    item: FlatOp, spot: FactorSpan
) -> Iterator[tuple[int, AxisSpan | None]]:
    """Yield each operand of an op with the dim that holds the batch, or None."""
    for value, layout in zip(item.operands, item.rule.operands, strict=True):
        yield value, place(item.rule, layout, spot)


_ROWS = 8
"""Number of rows of the batch for which positions and counts are evaluated."""

_MAX_STEPS = 200
"""Maximum number of ops from sorted keys to the sizes of their groups."""

_EVALUATED = RECOMPUTED_KINDS | {OpKind.GENERATOR, OpKind.REDUCTION, OpKind.SCATTER}
"""Kinds of ops by which the keys of a sort are counted."""


@dataclass
class Evaluation:
    """Arrays of values that depend on positions, or on the keys of a sort, alone.

    Attributes:
      flat: the program.
      states, ran: as of `regions.Flow`, which adds to them.
      tables: arrays of positions, by the number that `Positions` has.
    """

    flat: FlatProgram
    states: Mapping[int, State]
    ran: Mapping[int, Ran]
    tables: list[np.ndarray] = field(default_factory=list)
    _counted: dict[int, int | None] = field(default_factory=dict)

    def counts(self, value: int, ran: Ran) -> int | None:
        """Return the keys of a sort that a value counts by group; None for others."""
        if value not in self._counted:
            key = self._counted_key(value)
            is_count = key is not None and self._is_count(value, key, ran)
            self._counted[value] = key if is_count else None
        return self._counted[value]

    def _is_count(self, value: int, key: int, ran: Ran) -> bool:
        """Whether a value has, for each group, the number of rows with its key."""
        values, state = self.flat.program.values, self.states.get(key)
        if not isinstance(state, RowsState):
            return False
        shape, (groups,) = self._shape(key, state), values[value].shape
        drawn = np.random.default_rng(0).integers(0, groups, shape)
        drawn = drawn.astype(values[key].dtype)
        item = self.flat.maker[value]
        results = self.results(item, ran, {key: drawn})
        if results is None:
            return False
        expected = np.bincount(drawn.reshape(-1), minlength=groups)
        return np.array_equal(results[item.results.index(value)], expected)

    def _counted_key(self, value: int) -> int | None:
        """Return the only key of a sort that a value is computed from, if it is."""
        ops: dict[int, FlatOp] = {}
        queue, keys = [value], set[int]()
        while queue:
            each = self._outside(queue.pop())
            root = self.root(each)
            if root in self.keys:
                keys.add(root)
                continue
            item = self.flat.maker.get(each)
            if item is None:
                if each in self.flat.consts:
                    continue
                return None
            is_known = item.op.traits.kind in _EVALUATED and not item.regions
            if not is_known or len(ops) > _MAX_STEPS:
                return None
            if item.op.id not in ops:
                ops[item.op.id] = item
                queue += item.operands
        return keys.pop() if len(keys) == 1 else None

    @cached_property
    def keys(self) -> frozenset[int]:
        """The roots of all that is sorted by."""
        sorts = (i for i in self.flat.maker.values() if i.op.name == "sort")
        return frozenset(self.root(i.operands[0]) for i in sorts)

    def root(self, value: int) -> int:
        """Return the value whose elements a value has, in whatever order."""
        while (item := self.flat.maker.get(value)) is not None:
            is_sorted_keys = item.op.name == "sort" and item.results[0] == value
            is_kept = is_sorted_keys or item.op.name == "reshape"
            if not is_kept and not self._are_keys_in_order(item):
                break
            value = item.operands[0]
        return value

    def _are_keys_in_order(self, item: FlatOp) -> bool:
        """Whether an op looks up the keys of a sort in the order that they give."""
        state, values = self.states.get(item.results[0]), self.flat.program.values
        if item.op.traits.kind is not OpKind.LOOKUP or not isinstance(state, RowsState):
            return False
        keys, found = values[item.operands[0]], values[item.results[0]]
        is_whole = keys.rank == 1 and keys.shape == found.shape
        return is_whole and state.order == self.root(item.operands[0])

    def evaluated(self, value: int, env: dict[int, Any]) -> np.ndarray | None:
        """Return the array of a value, of `_ROWS` rows where micro-batches have some.

        Args:
          value: id of the value.
          env: value id → array, of those that are known; results are added.
        Returns:
          None where it depends on other values.
        """
        if value in env:
            return env[value]
        if (root := self.root(value)) in env:
            return env[root].reshape(self._shape(value, self.states[value]))
        value = self._outside(value)
        if value in self.flat.consts:
            const = self.flat.consts[value]
            return np.asarray(const, self.flat.program.values[value].dtype)
        item = self.flat.maker.get(value)
        ran = self.ran.get(item.op.id) if item is not None else None
        if item is None or ran is None:
            return None
        results = self.results(item, ran, env)
        if results is None:
            return None
        env.update(zip(item.results, results, strict=True))
        return env[value]

    def results(
        self, item: FlatOp, ran: Ran, env: dict[int, Any]
    ) -> list[np.ndarray] | None:
        """Return the results of an op, as `evaluated` does."""
        if item.regions or item.op.traits.kind not in _EVALUATED:
            return None
        arrays: list[np.ndarray] = []
        for value, use in zip(item.operands, ran.uses, strict=True):
            x = self.evaluated(value, env)
            if x is None:
                return None
            shape = self._shape(value, use)
            arrays.append(x[tuple(slice(n) for n in shape)])
            if arrays[-1].shape != shape:
                return None  # the stack of a loop
        shapes = [*map(self._shape, item.results, ran.results)]
        with jax.ensure_compile_time_eval(), item.context():
            return [*map(np.asarray, bind_local(item.eqn, arrays, shapes))]

    def _shape(self, value: int, state: State) -> tuple[int, ...]:
        """Return the shape of a value, with `_ROWS` rows of the batch."""
        shape = self.flat.program.values[value].shape
        if isinstance(state, RowsState):
            return state.span.resized(shape, min(_ROWS, state.span.size))
        return shape

    def places(self, span: AxisSpan) -> np.ndarray:
        """Return the positions of the rows for which values are evaluated: the first
        and the last of the batch."""
        rows, count = min(_ROWS, span.size), span.size * span.inner
        first = rows // 2 * span.inner
        last = rows * span.inner - first
        return np.r_[:first, count - last : count]

    def is_even(self, value: int, span: AxisSpan) -> bool:
        """Whether a complete value is the same in all rows of a dim."""
        value = self._outside(value)
        if value in self.flat.consts:
            return np.ndim(self.flat.consts[value]) == 0
        item = self.flat.maker.get(value)
        spot = spot_of(item, value, span) if item is not None else None
        if item is None or spot is None or part_of(item.eqn) is not None:
            return False
        return all(
            at is None or self.is_even(operand, at)
            for operand, at in operands_cut(item, spot)
        )

    @cached_property
    def _entering(self) -> Mapping[int, int]:
        """Values that enter regions unchanged → the values outside that they are."""
        makers = {i.op.id: i for i in self.flat.maker.values() if i.regions}
        return {
            v: item.operands[at.operands[0]]
            for item in makers.values()
            for at in crossings(item.op)
            if at.operands and not at.results and not at.is_stack
            for v in at.entering
        }

    def _outside(self, value: int) -> int:
        """Return the value outside of all regions that enters them unchanged."""
        while value in self._entering:
            value = self._entering[value]
        return value

    def table(self, array: np.ndarray) -> int:
        """Return the number of a table of positions."""
        for number, known in enumerate(self.tables):
            if known.dtype == array.dtype and np.array_equal(known, array):
                return number
        self.tables.append(array)
        return len(self.tables) - 1
