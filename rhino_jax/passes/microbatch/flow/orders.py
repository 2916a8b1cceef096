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

import numpy as np

from rhino_jax.frontend.rules.dot import RAGGED_DOTS
from rhino_jax.ir.axes import AxisSpan, locate, place
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.microbatch.flow.evaluated import Evaluation
from rhino_jax.passes.microbatch.flow.ops import DimSizes, Needs, Ran, run_plain
from rhino_jax.passes.microbatch.flow.states import (
    Partial,
    Positions,
    RowsState,
    State,
    WholeState,
    is_outside,
    is_sorted,
)
from rhino_jax.rewrite.flat import FlatOp


@dataclass(eq=False)
class NeedsOrderOfAll(Exception):
    """An op needs rows that micro-batches sort in the order of the whole batch.

    Attributes:
      keys: ids of the values by which they are sorted.
    """

    keys: frozenset[int]


@dataclass(kw_only=True)
class Orders(Evaluation):
    """The sorts of a program that each micro-batch does by itself.

    Attributes:
      sizes: size of the batch, and limits on cheap values.
      of_all: ids of the keys whose sorts take all rows at once.
    """

    sizes: DimSizes
    of_all: set[int] = field(default_factory=set)
    _num_sorted: dict[int, int] = field(default_factory=dict)

    def run(self, item: FlatOp, states: Sequence[State]) -> Ran | Needs:
        """Return how an op without regions runs, or the operands that it needs in full.

        Raises:
          NeedsOrderOfAll: it needs rows that are sorted in the order of them all.
        """
        own = {i: s for i, s in enumerate(states) if is_sorted(s)}
        special = self._moved(item, states) if own else self._sorted(item, states)
        if special is not None:
            return special
        found = run_plain(self.flat, item, states, self.sizes)
        if isinstance(found, Needs):
            if not own.keys().isdisjoint(found.operands):
                raise _needs(own.values())
            return found
        if own:
            found = self._labelled(item, states, found)
        # Partial sums with the keys that they count.
        values = self.flat.program.values
        results = tuple(
            replace(state, counts=self.counts(value, found))
            if isinstance(state, Partial)
            and state.reducer == "sum"
            and values[value].rank == 1
            and "int" in values[value].dtype
            else state
            for value, state in zip(item.results, found.results, strict=True)
        )
        return replace(found, results=results)

    def _sorted(self, item: FlatOp, states: Sequence[State]) -> Ran | None:
        """Return how rows of the batch are sorted, with their positions."""
        params = item.eqn.params
        if item.op.name != "sort" or params["num_keys"] != 1 or not params["is_stable"]:
            return None
        key, dim = states[0], params["dimension"]
        if not isinstance(key, RowsState) or key.span.dim != dim or key.span.outer > 1:
            return None
        root = self.root(item.operands[0])
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
                whole = self.evaluated(value, {})
                if whole is None or not np.array_equal(whole, np.arange(whole.size)):
                    return None
                at = Positions(
                    positions_in,
                    self.table(whole[self.places(span)]),
                )
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
        found = self._at_positions(item, states, index, index.at)
        if found is None:
            raise _needs([index])
        return found

    def _at_positions(
        self,
        item: FlatOp,
        states: Sequence[State],
        index: RowsState,
        where: Positions,
    ) -> Ran | None:
        """Return how rows are looked up, or written, at positions of a micro-batch.

        Args:
          item: the op.
          states: states of its operands.
          index: that of the positions, `where`.
        Returns:
          None where it needs the rows of the whole batch.
        """
        traits, values = item.op.traits, self.flat.program.values
        dims, rule = item.eqn.params["dimension_numbers"], item.op.rule
        mapped = getattr(dims, "start_index_map", None)
        if mapped is None:
            mapped = dims.scatter_dims_to_operand_dims
        is_major = index.span.dim == 0 and index.span.outer == 1
        if rule is None or len(mapped) != 1 or not is_major:
            return None
        (dim,), rows = mapped, index.span.size
        spot = locate(rule, rule.operands[1], index.span)
        (factor,) = rule.operands[0][dim] or (None,)
        is_index = factor is None or rule.factors[factor].kind is FactorKind.INDEX
        size = values[item.operands[0]].shape[dim]
        count = math.prod(values[item.operands[1]].shape)
        step, left = divmod(count, max(size, 1))
        if spot is None or not is_index or left or size % rows:
            return None
        table = self.tables[where.table].reshape(-1)
        expected = self.places(AxisSpan(0, rows, inner=count // rows))
        if not np.array_equal(table, expected // max(step, 1)):
            return None
        held = AxisSpan(dim, rows, inner=size // rows)
        phase = max(s.phase for s in states)
        use = self._in_order(item.operands[0], states[0], held, where.order)
        if use is None:
            return None
        if traits.kind is OpKind.LOOKUP:
            made = place(rule, rule.results[0], spot)
            if made is None:
                return None
            return Ran((use, index), (RowsState(made, phase, order=index.order),))
        at = place(rule, rule.operands[2], spot)
        is_set = not traits.reducer
        if at is None or (is_set and step > 1):
            return None
        if is_set and (to := self._written(item, index)) is not None:
            written = RowsState(held, phase, at=to)
            return Ran((use, index, RowsState(at, at=to)), (written,))
        more = self._in_order(item.operands[2], states[2], at, index.order)
        written = RowsState(held, phase, order=where.order)
        if more is None or not self._holds_rows(written):
            return None
        return Ran((use, index, more), (written,))

    def _in_order(
        self, value: int, state: State, span: AxisSpan, order: int | None
    ) -> State | None:
        """Return the state in which a value is read whose rows have to be in an order;
        None where they are not."""
        if isinstance(state, WholeState) and is_outside(state):
            is_any = order is None or self.is_even(value, span)
            return RowsState(span, is_own=state.is_own) if is_any else None
        if not isinstance(state, RowsState) or state.at is not None:
            return None
        return state if (state.span, state.order) == (span, order) else None

    def _written(self, item: FlatOp, index: RowsState) -> Positions | None:
        """Return the positions that a scatter of 0, 1, 2, … at positions writes: where
        each row went. None for other scatters."""
        rows = self.evaluated(item.operands[2], {})
        if rows is None or index.at is None or index.at.order is not None:
            return None
        at = self.tables[index.at.table].reshape(-1)
        if not np.array_equal(rows, np.arange(rows.size)):
            return None
        if not np.array_equal(at, self.places(index.span)):
            return None
        return Positions(index.order, self.table(at.astype(rows.dtype)))

    def _grouped(self, item: FlatOp, states: Sequence[State]) -> Ran | None:
        """Return how sorted rows are multiplied, each by the matrix of its group."""
        rule, (*factors, counts) = item.op.rule, states
        rows = [s for s in factors if isinstance(s, RowsState)]
        if rule is None or not rows or not isinstance(counts, Partial):
            raise _needs(states)
        # Loops after the one whose sum is known in full count their own rows again.
        order, phase = counts.counts, max(s.phase for s in states)
        spots = {
            locate(rule, layout, s.span)
            for s, layout in zip(factors, rule.operands, strict=False)
            if isinstance(s, RowsState)
        }
        alike = all(s.order == order and s.at is None for s in rows)
        spot = spots.pop()
        if not alike or order is None or spots or spot is None:
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
            table = self.tables[key.at.table]
            if np.array_equal(table, self.places(key.span)):
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
            elif not self.is_even(value, use.span):
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
        uses = (
            replace(use, order=order)
            if isinstance(use, RowsState) and not isinstance(state, RowsState)
            else use
            for use, state in zip(ran.uses, states, strict=True)
        )
        return Ran(tuple(uses), tuple(made))

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
            v: self.tables[s.at.table]
            for v, s in zip(item.operands, states, strict=True)
            if isinstance(s, RowsState) and s.at is not None
        }
        orders = {s.at.order for s in states if isinstance(s, RowsState) and s.at}
        if not env:
            return [None] * len(item.results)
        made = self.results(item, ran, env) if len(orders) == 1 else None
        if made is not None:
            (order,) = orders
            return [Positions(order, self.table(x)) for x in made]
        # What is equal for all rows, as a check of bounds, is no position.
        if any((x != x.ravel()[:1]).any() for x in env.values()):
            raise _needs(states)
        return [None] * len(item.results)


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
