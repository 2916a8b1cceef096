"""Rows that each micro-batch sorts by itself: tokens, in the order of their experts.

A dropless mixture of experts sorts its (token, choice) rows by expert, multiplies each
group by the expert's matrix (`ragged_dot`), and puts the results back in place. That
needs the whole batch nowhere: what is computed from a row is the same whatever other
rows are sorted with it. A micro-batch then sorts its own rows, counts its own groups,
and its positions count from its own first row.

That holds where all that is done to sorted rows is done to each alone, or sums over
them all; where rows are looked up, and written, at the positions that the sort gives;
and where the sizes of the groups count the very keys that were sorted by. Positions,
and what is computed from them alone, are followed as arrays: those of rows in their own
order are 0, 1, 2, … What the program makes of them (`order // k`, wraps of negative
indices, checks of bounds) is evaluated, not recognised, for the first and the last rows
of the batch. Counts are compared with those of drawn keys.

Anything else raises `NeedsOrderOfAll`: the sort then takes all rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rhino_jax._compat import bind_eqn
from rhino_jax.frontend.registry import local_params, part_of
from rhino_jax.frontend.rules.dot import RAGGED_DOTS
from rhino_jax.ir.axes import AxisSpan, crossings, locate, place
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.microbatch.flow.generated import operands_cut, spot_of
from rhino_jax.passes.microbatch.flow.ops import Needs, Ran, run_plain
from rhino_jax.passes.microbatch.flow.states import (
    Partial,
    Positions,
    RowsState,
    State,
    WholeState,
    is_outside,
    is_sorted,
)
from rhino_jax.rewrite.flat import FlatOp, FlatProgram


if TYPE_CHECKING:
    from rhino_jax.passes.microbatch.flow.regions import Flow

_ROWS = 8
"""Number of rows of the batch for which positions and counts are evaluated."""

_MAX_STEPS = 200
"""Maximum number of ops from sorted keys to the sizes of their groups."""

_EVALUATED = frozenset({
    OpKind.ELEMENTWISE, OpKind.EXPONENTIAL, OpKind.CONVERSION, OpKind.IDENTITY,
    OpKind.BROADCAST, OpKind.MOVEMENT, OpKind.GENERATOR, OpKind.REDUCTION,
    OpKind.SCATTER,
})  # fmt: skip
"""Kinds of ops by which the keys of a sort are counted."""


class NeedsOrderOfAll(Exception):
    """What is done to the rows of a micro-batch in an order of its own needs the order
    of the whole batch.

    Attributes:
      keys: ids of the values by which they are sorted.
    """

    def __init__(self, keys: frozenset[int]) -> None:
        super().__init__(keys)
        self.keys = keys


@dataclass(slots=True)
class Orders:
    """The sorts of a program that each micro-batch does by itself.

    Attributes:
      flow: the analysis that they are part of.
      of_all: ids of the keys whose sorts take all rows at once.
    """

    flow: Flow
    of_all: set[int] = field(default_factory=set)
    _num_sorted: dict[int, int] = field(default_factory=dict)
    _tables: list[np.ndarray] = field(default_factory=list)
    _counted: dict[int, int | None] = field(default_factory=dict)
    _sort_keys: frozenset[int] | None = None
    _entering: dict[int, int] | None = None

    @property
    def flat(self) -> FlatProgram:
        """The program."""
        return self.flow.flat

    def run(self, item: FlatOp, states: Sequence[State]) -> Ran | Needs:
        """Return how an op without regions runs, or the operands that it needs in full.

        Raises:
          NeedsOrderOfAll: it needs rows that are sorted in the order of them all.
        """
        own = {i: s for i, s in enumerate(states) if is_sorted(s)}
        special = self._moved(item, states) if own else self._sorted(item, states)
        if special is not None:
            return special
        found = run_plain(self.flat, item, states, self.flow.sizes)
        if isinstance(found, Needs):
            if not own.keys().isdisjoint(found.operands):
                raise _needs(own.values())
            return found
        if own:
            found = self._labelled(item, states, found)
        return self._with_counts(item, found)

    def _sorted(self, item: FlatOp, states: Sequence[State]) -> Ran | None:
        """Return how rows of the batch are sorted, with their positions."""
        if item.op.name != "sort" or item.eqn.params["num_keys"] != 1:
            return None
        key, dim = states[0], item.eqn.params["dimension"]
        if not isinstance(key, RowsState) or key.span.dim != dim or key.span.outer > 1:
            return None
        if not item.eqn.params["is_stable"]:
            return None
        root = self._root(item.operands[0])
        if root in self.of_all or self.flat.program.values[item.operands[0]].rank != 1:
            return None
        self._num_sorted[root] = key.span.size * key.span.inner
        return self._ordered(item, states, key.span, root, None)

    def _ordered(
        self,
        item: FlatOp,
        states: Sequence[State],
        span: AxisSpan,
        order: int | None,
        positions_in: int | None,
    ) -> Ran | None:
        """Return how a sort of a micro-batch's rows runs.

        Args:
          item: the sort.
          states: states of its operands.
          span: the dim that holds the batch.
          order: the order of its results.
          positions_in: the order of its operands.
        """
        phase = max(s.phase for s in states)
        uses: list[State] = []
        results: list[State] = []
        for value, state in zip(item.operands, states, strict=True):
            made = RowsState(span, phase, order=order)
            use = state
            if isinstance(state, WholeState) and is_outside(state):
                whole = self._evaluated(value, {})
                if whole is None or not np.array_equal(whole, np.arange(whole.size)):
                    return None
                at = Positions(positions_in, self._table(whole[self._places(span)]))
                use, made = replace(made, order=None, at=at), replace(made, at=at)
            elif not isinstance(state, RowsState) or state.span != span:
                return None
            uses.append(use)
            results.append(made)
        return Ran(tuple(uses), tuple(results))

    def _moved(self, item: FlatOp, states: Sequence[State]) -> Ran | None:
        """Return how rows are looked up, written, or multiplied by group."""
        traits = item.op.traits
        if item.op.name in RAGGED_DOTS:
            return self._grouped(item, states)
        if item.op.name == "sort":
            return self._inverse(item, states)
        if traits.kind not in (OpKind.LOOKUP, OpKind.SCATTER) or len(states) < 2:
            return None
        index = states[1]
        if not isinstance(index, RowsState) or index.at is None:
            return None
        dims, rule = item.eqn.params["dimension_numbers"], item.op.rule
        mapped = getattr(dims, "start_index_map", None)
        if mapped is None:
            mapped = dims.scatter_dims_to_operand_dims
        if rule is None or len(mapped) != 1 or not _is_major(index.span):
            raise _needs([index])
        spot = locate(rule, rule.operands[1], index.span)
        shape = self.flat.program.values[item.operands[0]].shape
        (dim,) = mapped
        rows = index.span.size
        (factor,) = rule.operands[0][dim] or (None,)
        is_index = factor is None or rule.factors[factor].kind is FactorKind.INDEX
        table = self._tables[index.at.table].reshape(-1)
        count = math.prod(self.flat.program.values[item.operands[1]].shape)
        step, left = divmod(count, max(shape[dim], 1))
        expected = self._places(AxisSpan(0, rows, inner=count // rows)) // max(step, 1)
        if (
            spot is None
            or not is_index
            or left
            or shape[dim] % rows
            or not np.array_equal(table, expected)
        ):
            raise _needs([index])
        held = AxisSpan(dim, rows, inner=shape[dim] // rows)
        phase = max(s.phase for s in states)
        whole = RowsState(held, order=index.at.order)
        array = states[0]
        if isinstance(array, WholeState) and is_outside(array):
            array_use: State = replace(whole, order=None, is_own=array.is_own)
            if whole.order is not None and not self._is_even(item.operands[0], held):
                raise _needs([index])
        elif isinstance(array, RowsState) and array.at is None:
            array_use = array
            if (array.span, array.order) != (held, whole.order):
                raise _needs([index])
        else:
            raise _needs([index])
        if traits.kind is OpKind.LOOKUP:
            made = place(rule, rule.results[0], spot)
            if made is None:
                raise _needs([index])
            result = RowsState(made, phase, order=index.order)
            return Ran((array_use, index), (result,))
        updates = states[2]
        at = place(rule, rule.operands[2], spot)
        is_set = not traits.reducer
        if at is None or (is_set and step > 1):
            raise _needs([index])
        use: State = updates
        if is_set and (where := self._written(item, index)) is not None:
            use = RowsState(at, at=where)
            written = RowsState(held, phase, at=where)
            return Ran((array_use, index, use), (written,))
        if isinstance(updates, WholeState) and is_outside(updates):
            use = RowsState(at)
            if index.order is not None and not self._is_even(item.operands[2], at):
                raise _needs([index])
        elif not isinstance(updates, RowsState) or updates.at is not None:
            raise _needs([index])
        elif (updates.span, updates.order) != (at, index.order):
            raise _needs([index])
        written = RowsState(held, phase, order=index.at.order)
        if not self._holds_rows(written):
            raise _needs([index])
        return Ran((array_use, index, use), (written,))

    def _written(self, item: FlatOp, index: RowsState) -> Positions | None:
        """Return the positions that a scatter of 0, 1, 2, … at positions writes: where
        each row went. None for other scatters."""
        rows = self._evaluated(item.operands[2], {})
        if rows is None or index.at is None or index.at.order is not None:
            return None
        at = self._tables[index.at.table].reshape(-1)
        if not np.array_equal(rows, np.arange(rows.size)):
            return None
        if not np.array_equal(at, self._places(index.span)):
            return None
        return Positions(index.order, self._table(at.astype(rows.dtype)))

    def _grouped(self, item: FlatOp, states: Sequence[State]) -> Ran | None:
        """Return how sorted rows are multiplied, each by the matrix of its group."""
        rule, (*factors, counts) = item.op.rule, states
        rows = [s for s in factors if isinstance(s, RowsState)]
        if rule is None or not rows or not isinstance(counts, Partial):
            raise _needs(states)
        order, phase = rows[0].order, max(s.phase for s in states)
        spots = {
            locate(rule, layout, s.span)
            for s, layout in zip(factors, rule.operands, strict=False)
            if isinstance(s, RowsState)
        }
        alike = all(s.order == order and s.at is None for s in rows)
        fits = counts.counts == order and counts.phase == phase
        spot = spots.pop()
        if not alike or not fits or order is None or spots or spot is None:
            raise _needs(rows)
        for state, layout in zip(factors, rule.operands, strict=False):
            is_cut = place(rule, layout, spot) is not None
            if is_cut != isinstance(state, RowsState) or isinstance(state, Partial):
                raise _needs(rows)
        if rule.factors[spot.factor].kind is not FactorKind.INDEX:
            raise _needs(rows)
        made = place(rule, rule.results[0], spot)
        result: State = Partial("sum", phase)
        if made is not None:
            result = RowsState(made, phase, order=order)
        return Ran(tuple(states), (result,))

    def _inverse(self, item: FlatOp, states: Sequence[State]) -> Ran:
        """Return how the positions of sorted rows are sorted: where each row went."""
        key, params = states[0], item.eqn.params
        if (
            isinstance(key, RowsState)
            and key.at is not None
            and key.at.order is None
            and (params["num_keys"], params["dimension"]) == (1, key.span.dim)
            and key.span.outer == 1
            and all(isinstance(s, WholeState) for s in states[1:])
        ):
            table = self._tables[key.at.table]
            if np.array_equal(table, self._places(key.span)):
                found = self._ordered(item, states, key.span, None, key.order)
                if found is not None:
                    at = replace(key.at, order=None)
                    first, *others = found.results
                    assert isinstance(first, RowsState)
                    return replace(found, results=(replace(first, at=at), *others))
        raise _needs(states)

    def _labelled(self, item: FlatOp, states: Sequence[State], ran: Ran) -> Ran:
        """Return how an op on sorted rows, or on positions, runs, with the order of its
        results."""
        orders = set[int | None]()
        for value, state, use in zip(item.operands, states, ran.uses, strict=True):
            if not isinstance(use, RowsState):
                continue
            if isinstance(state, RowsState):
                orders.add(state.order)
            elif not self._is_even(value, use.span):
                orders.add(None)
        if len(orders) != 1 or any(isinstance(s, Partial) for s in states):
            raise _needs(states)
        (order,) = orders
        at = self._positions(item, states, ran)
        made: list[State] = []
        for result, table in zip(ran.results, at, strict=True):
            if isinstance(result, RowsState):
                result = replace(result, order=order, at=table, cheap=None)
                if not self._holds_rows(result):
                    raise _needs(states)
            elif table is not None or isinstance(result, WholeState):
                raise _needs(states)
            elif isinstance(result, Partial):
                result = replace(result, cheap=None)
            made.append(result)
        return replace(ran, results=tuple(made))

    def _holds_rows(self, state: RowsState) -> bool:
        """Whether one dim has all sorted rows: of a part of them, neighbours would be
        others in every micro-batch."""
        if state.order is None:
            return True
        rows, span = self._num_sorted[state.order], state.span
        return span.outer == 1 and span.size * span.inner == rows

    def _positions(
        self, item: FlatOp, states: Sequence[State], ran: Ran
    ) -> Sequence[Positions | None]:
        """Return what the results of an op are as functions of positions; None for
        those that do not depend on them.

        Raises:
          NeedsOrderOfAll: they depend on other values, too.
        """
        env = {
            v: self._tables[s.at.table]
            for v, s in zip(item.operands, states, strict=True)
            if isinstance(s, RowsState) and s.at is not None
        }
        orders = {s.at.order for s in states if isinstance(s, RowsState) and s.at}
        if not env:
            return [None] * len(item.results)
        # What is equal for all rows, as a check of bounds, is no position.
        is_even = all(len(np.unique(x)) == 1 for x in env.values())
        made = self._results(item, ran, env) if len(orders) == 1 else None
        if made is not None:
            (order,) = orders
            return [Positions(order, self._table(x)) for x in made]
        if not is_even:
            raise _needs(states)
        return [None] * len(item.results)

    def _with_counts(self, item: FlatOp, ran: Ran) -> Ran:
        """Return how an op runs, with the keys that its partial sums count."""
        values = self.flat.program.values
        results = tuple(
            replace(state, counts=self._counts(value, ran))
            if isinstance(state, Partial)
            and state.reducer == "sum"
            and values[value].rank == 1
            and "int" in values[value].dtype
            else state
            for value, state in zip(item.results, ran.results, strict=True)
        )
        return replace(ran, results=results)

    def _counts(self, value: int, ran: Ran) -> int | None:
        """Return the keys of a sort that a value counts by group; None for others."""
        if value not in self._counted:
            key = self._counted_key(value)
            is_count = key is not None and self._is_count(value, key, ran)
            self._counted[value] = key if is_count else None
        return self._counted[value]

    def _is_count(self, value: int, key: int, ran: Ran) -> bool:
        """Whether a value has, for each group, the number of rows with its key."""
        values, state = self.flat.program.values, self.flow.states.get(key)
        if not isinstance(state, RowsState):
            return False
        shape, (groups,) = self._shape(key, state), values[value].shape
        drawn = np.random.default_rng(0).integers(0, groups, shape)
        drawn = drawn.astype(values[key].dtype)
        item = self.flat.maker[value]
        results = self._results(item, ran, {key: drawn})
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
            root = self._root(each)
            if root in self.keys():
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

    def keys(self) -> frozenset[int]:
        """Return the roots of all that is sorted by."""
        if self._sort_keys is None:
            sorts = [i for i in self.flat.maker.values() if i.op.name == "sort"]
            self._sort_keys = frozenset(self._root(i.operands[0]) for i in sorts)
        return self._sort_keys

    def _root(self, value: int) -> int:
        """Return the value whose elements a value has, in whatever order."""
        while (item := self.flat.maker.get(value)) is not None:
            is_sorted_keys = item.op.name == "sort" and item.results[0] == value
            if not is_sorted_keys and item.op.name not in ("reshape", "squeeze"):
                break
            value = item.operands[0]
        return value

    def _evaluated(self, value: int, env: dict[int, Any]) -> np.ndarray | None:
        """Return the array of a value, of `_ROWS` rows where micro-batches have some.

        Args:
          value: id of the value.
          env: value id → array, of those that are known; results are added.
        Returns:
          None where it depends on other values.
        """
        if value in env:
            return env[value]
        if (root := self._root(value)) in env:
            return env[root].reshape(self._shape(value, self.flow.states[value]))
        value = self._outside(value)
        if value in self.flat.consts:
            const = self.flat.consts[value]
            return np.asarray(const, self.flat.program.values[value].dtype)
        item = self.flat.maker.get(value)
        ran = self.flow.ran.get(item.op.id) if item is not None else None
        if item is None or ran is None:
            return None
        results = self._results(item, ran, env)
        if results is None:
            return None
        env.update(zip(item.results, results, strict=True))
        return env[value]

    def _results(
        self, item: FlatOp, ran: Ran, env: dict[int, Any]
    ) -> list[np.ndarray] | None:
        """Return the results of an op, as `_evaluated` does."""
        if item.regions or item.op.traits.kind not in _EVALUATED:
            return None
        arrays: list[np.ndarray] = []
        for value, use in zip(item.operands, ran.uses, strict=True):
            x = self._evaluated(value, env)
            if x is None:
                return None
            shape = self._shape(value, use)
            arrays.append(x[tuple(slice(n) for n in shape)])
            if arrays[-1].shape != shape:
                return None  # the stack of a loop
        shapes = [*map(self._shape, item.results, ran.results)]
        params = item.eqn.params
        if shapes != [v.aval.shape for v in item.eqn.outvars]:
            ins = [x.shape for x in arrays]
            params = local_params(item.op.name, params, ins, shapes)
        with jax.ensure_compile_time_eval(), item.context():
            return [np.asarray(x) for x in bind_eqn(item.eqn, arrays, params)]

    def _shape(self, value: int, state: State) -> tuple[int, ...]:
        """Return the shape of a value, with `_ROWS` rows of the batch."""
        shape = self.flat.program.values[value].shape
        if isinstance(state, RowsState):
            return state.span.resized(shape, min(_ROWS, state.span.size))
        return shape

    def _places(self, span: AxisSpan) -> np.ndarray:
        """Return the positions of the rows for which values are evaluated: the first
        and the last of the batch."""
        rows, count = min(_ROWS, span.size), span.size * span.inner
        first = rows // 2 * span.inner
        last = rows * span.inner - first
        return np.r_[:first, count - last : count]

    def _is_even(self, value: int, span: AxisSpan) -> bool:
        """Whether a complete value is the same in all rows of a dim."""
        value = self._outside(value)
        if value in self.flat.consts:
            return np.ndim(self.flat.consts[value]) == 0
        item = self.flat.maker.get(value)
        spot = spot_of(item, value, span) if item is not None else None
        if item is None or spot is None or part_of(item.eqn) is not None:
            return False
        return all(
            at is None or self._is_even(operand, at)
            for operand, at in operands_cut(item, spot)
        )

    def _outside(self, value: int) -> int:
        """Return the value outside of all regions that enters them unchanged."""
        if self._entering is None:
            makers = {i.op.id: i for i in self.flat.maker.values() if i.regions}
            self._entering = {
                v: item.operands[at.operands[0]]
                for item in makers.values()
                for at in crossings(item.op)
                if at.operands and not at.results and not at.is_stack
                for v in at.entering
            }
        while value in self._entering:
            value = self._entering[value]
        return value

    def _table(self, array: np.ndarray) -> int:
        """Return the number of a table of positions."""
        for number, known in enumerate(self._tables):
            if known.dtype == array.dtype and np.array_equal(known, array):
                return number
        self._tables.append(array)
        return len(self._tables) - 1


def _is_major(span: AxisSpan) -> bool:
    """Whether the batch is the major part of a value's elements."""
    return span.dim == 0 and span.outer == 1


def check_in_full(states: Iterable[State]) -> None:
    """Refuse sorted rows, and positions, that are needed in full.

    Raises:
      NeedsOrderOfAll: some are.
    """
    own = [s for s in states if is_sorted(s)]
    if own:
        raise _needs(own)


def _needs(states: Iterable[State]) -> NeedsOrderOfAll:
    rows = [s for s in states if isinstance(s, RowsState)]
    orders = {s.order for s in rows} | {s.at.order for s in rows if s.at is not None}
    return NeedsOrderOfAll(frozenset(x for x in orders if x is not None))
