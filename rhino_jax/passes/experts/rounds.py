"""Emit a program with its experts in parts, each of which has the rows of its experts.

All that is done to sorted rows is done in rounds, in a loop (`buffers`). As many rounds
run as some block has rows for some part; that is one, unless tokens take experts of one
part far more often than of others: no row is ever left out. Sums over rows are added up
over rounds; rows that other ops read are stacked, as many as there may be. Where rows
leave a loop over layers, as for gradients without `jax.checkpoint`, one round has room
for all. Order, positions and counts of rows are computed outside, for each block.

Planned is one round (`ROUNDS`), as if tokens were spread well enough: a further round
takes as long again, and no memory that the first did not. Without gradients in the
program there is one round: a loop of unknown length cannot be differentiated from
outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax.errors import MicrobatchError
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.experts.buffers import Buffers, num_slots
from rhino_jax.passes.experts.emit import (
    BlocksEmitter,
    InBlocks,
    SortedTokens,
    is_product,
    whole_of,
)
from rhino_jax.passes.experts.moves import Blocks
from rhino_jax.passes.microbatch.flow.states import Partial, RowsState, State
from rhino_jax.rewrite.emit import bind_local
from rhino_jax.rewrite.flat import FlatOp, FlatRegion


ROUNDS = "experts_rounds"
"""`jax.named_scope` of the loops over rounds, by which they are planned."""


class RowsAreSaved(Exception):
    """Sorted rows of several rounds leave a loop over layers.

    Stacks of as many rounds as there may be would be copied into those of the loop: 29
    of 74 ms of a mixture of 256 experts on tpu7x:2x2x1.
    """


@dataclass(slots=True)
class RoundsEmitter(BlocksEmitter):
    """Emitter of a program's ops.

    Attributes:
      parts: number of parts of the experts.
      groups: number of groups of blocks whose rows a part multiplies together.
      is_one_round: whether there is room for all rows of a block in every part.
      may_loop: whether rounds may be a loop; else one round must do.
    """

    parts: int = 1
    groups: int = 1
    is_one_round: bool = False
    may_loop: bool = True

    def region(self, region: FlatRegion, arrays: Sequence[Any]) -> list[Any]:
        """Run the ops of a region, those on sorted rows in as few loops as possible."""
        self.env.update(zip(region.inputs, arrays, strict=True))
        inside: list[int] = []
        after: list[FlatOp] = []
        rows, late = set[int](), set[int]()
        for k, item in enumerate(region.ops):
            reads, results = {*item.operands}, {*item.results}
            if _is_inside(self.tokens, item):
                if reads & late:
                    self.rounds(region, inside, after)
                    inside, after, rows, late = [], [], set(), set()
                inside.append(k)
                rows |= {v for v in results if _is_rows(self.tokens, v)}
                late |= results - rows
            elif reads & late or (reads & rows and not _is_count(self.tokens, item)):
                after.append(item)
                late |= results
            else:
                self.now(item)
        self.rounds(region, inside, after)
        return [self.read(v) for v in region.outputs]

    def now(self, item: FlatOp) -> None:
        """Run an op outside of rounds; its sorted rows have the sizes of their order,
        and counts are sums of sizes."""
        tokens, values = self.tokens, self.tokens.flat.program.values
        is_count = _is_count(tokens, item)
        with item.context():
            found = item.results if is_count else self.item(item)
            for v, x in zip(item.results, found, strict=True):
                keys = tokens.counted(v) if is_count else tokens.order(v)
                if keys is not None and not isinstance(x, InBlocks):
                    sizes = self.sizes(keys, [item])
                    if is_count:
                        x = jnp.sum(sizes, axis=0, dtype=values[v].dtype)
                    x = InBlocks(x, sizes)
                self.env[v] = x

    def sizes(self, keys: int, items: Iterable[FlatOp]) -> Any:
        """Return the number of rows of each block by expert, [blocks, experts].

        Args:
          keys: the keys by which rows are sorted.
          items: ops on these rows.
        """
        tokens = self.tokens
        for v in (v for item in items for v in item.operands):
            x = self.env.get(v)
            if keys in (tokens.order(v), tokens.counted(v)) and isinstance(x, InBlocks):
                return x.sizes
        keys_of_rows = whole_of(self.read(keys))
        return self.blocks.sizes(keys_of_rows, tokens.experts[keys], jnp.int32)

    def rounds(
        self, region: FlatRegion, places: list[int], after: Iterable[FlatOp]
    ) -> None:
        """Run ops in rounds, and others after them.

        Args:
          region: the region of the ops.
          places: positions of those to run in rounds.
          after: those that read their results.
        """
        items = [region.ops[k] for k in places]
        outs = [
            v
            for v in (v for item in items for v in item.results)
            if v in region.outputs
            or not {*places}.issuperset(region.readers.get(v, ()))
        ]
        if outs:
            leaving = {*region.outputs} if region is not self.tokens.flat.top else set()
            with items[0].context(), jax.named_scope(ROUNDS):
                self.loop(items, outs, leaving)
        for item in after:
            self.now(item)

    def loop(
        self, items: Sequence[FlatOp], outs: Sequence[int], leaving: Set[int]
    ) -> None:
        """Run ops in rounds.

        Args:
          items: the ops.
          outs: results that others read.
          leaving: values that leave the loop over layers that the ops are in.
        Raises:
          RowsAreSaved: rows do, and may be those of several rounds.
        """
        tokens = self.tokens
        orders = {
            keys: self.sizes(keys, items)
            for item in items
            for v in (*item.operands, *item.results)
            if (keys := tokens.order(v)) is not None
        }
        values, count = tokens.flat.program.values, self.blocks.count
        rows = {k: math.prod(values[k].shape) // count for k in orders}
        slots = {
            k: rows[k] if self.is_one_round else num_slots(rows[k], self.parts)
            for k in orders
        }
        sizes, is_rows = {}, [_is_rows(tokens, v) for v in outs]
        for k, x in orders.items():
            split = jnp.reshape(x.astype(jnp.int32), (len(x), self.parts, -1))
            sizes[k] = jnp.swapaxes(split, 0, 1)

        def run(number: Any) -> list[Any]:
            buffers = {
                k: Buffers.of(x, rows[k], slots[k], number * slots[k], self.groups)
                for k, x in sizes.items()
            }
            one = Round(self, number, buffers)
            for item in items:
                with item.context():
                    one.run(item)
            return [one.env[v] for v in outs]

        def step(state: Any) -> Any:
            number, *before = state
            found = [
                lax.dynamic_update_index_in_dim(old, new, number, 0) if s else old + new
                for s, old, new in zip(is_rows, before, run(number), strict=True)
            ]
            return [number + 1, *found]

        most = max(-(-rows[k] // slots[k]) for k in orders)
        rows_leave = any(s and v in leaving for s, v in zip(is_rows, outs, strict=True))
        if rows_leave and most > 1:
            raise RowsAreSaved
        if not self.may_loop:
            found = [
                x[None] if s else x
                for s, x in zip(is_rows, run(jnp.int32(0)), strict=True)
            ]
        else:
            types = jax.eval_shape(run, jax.ShapeDtypeStruct((), jnp.int32))
            start = [
                jnp.zeros((most, *t.shape) if s else t.shape, t.dtype)
                for s, t in zip(is_rows, types, strict=True)
            ]
            needed = jnp.int32(0)
            for k, x in sizes.items():
                largest = jnp.max(jnp.sum(x, axis=2))
                needed = jnp.maximum(needed, -(-largest // slots[k]))
            _, *found = lax.while_loop(
                lambda state: state[0] < needed, step, [jnp.int32(0), *start]
            )
        for v, x in zip(outs, found, strict=True):
            keys = tokens.order(v)
            self.env[v] = x if keys is None else InBlocks(x, orders[keys], 1)


@dataclass(slots=True)
class Round:
    """A round.

    Attributes:
      emitter: the emitter of what is outside.
      number: its number.
      buffers: keys → buffers of the rows sorted by them.
      env: value id → array of sorted rows, [parts, …]; or of a sum over the round's.
    """

    emitter: RoundsEmitter
    number: Any
    buffers: Mapping[int, Buffers]
    env: dict[int, Any] = field(default_factory=dict)

    def run(self, item: FlatOp) -> None:
        """Run an op."""
        flow, index = self.emitter.tokens.flow, item.operands[1:2]
        at = flow.states.get(index[0]) if index else None
        if item.op.traits.kind not in (OpKind.LOOKUP, OpKind.SCATTER):
            at = None
        if isinstance(at, RowsState) and at.at:
            found = [self.send(item, at)]
        else:
            found = self.in_parts(item)
        self.env.update(zip(item.results, found, strict=True))

    def of(self, item: FlatOp) -> Buffers:
        """Return the buffers of the rows that an op reads or computes."""
        orders = map(self.emitter.tokens.order, (*item.operands, *item.results))
        return next(self.buffers[k] for k in orders if k is not None)

    def rows(self, value: int, buffers: Buffers, dim: int) -> Any:
        """Return sorted rows, [parts, …].

        Args:
          value: the id of the value.
          buffers: those of its order.
          dim: the dim that has the rows.
        """
        if value not in self.env:
            x = self.emitter.read(value)
            if x.dim is None:
                sent = buffers.positions(jnp.moveaxis(x.x, dim, 0))
                found = buffers.to_parts(sent, 0)
                self.env[value] = jnp.moveaxis(found, 1, dim + 1)
            else:
                self.env[value] = lax.dynamic_index_in_dim(
                    x.x, self.number, x.dim - 1, keepdims=False
                )
        return self.env[value]

    def in_parts(self, item: FlatOp) -> list[Any]:
        """Run an op on the rows of each part."""
        tokens, buffers = self.emitter.tokens, self.of(item)
        flow, uses = tokens.flow, tokens.flow.ran[item.op.id].uses
        arrays: list[Any] = []
        dims: list[int | None] = []
        for v, use in zip(item.operands, uses, strict=True):
            is_rows = _is_sorted(flow.states.get(v), tokens)
            if is_rows and isinstance(use, RowsState):
                arrays.append(self.rows(v, buffers, use.span.dim))
            else:
                x = whole_of(self.emitter.read(v))
                if _is_sorted(use, tokens):
                    x = _repeated(x, use.span.dim, buffers.size)
                arrays.append(x)
            dims.append(0 if is_rows else None)
        is_sum = isinstance(flow.states[item.results[0]], Partial)
        shapes = [self.shape(v, buffers) for v in item.results]
        if is_product(flow, item):
            return [self.multiply(item, arrays[:2], shapes[0])]
        if is_sum:
            at, dim = _summed(tokens, item)
            x = arrays[at] if dims[at] == 0 else arrays[at][None]
            others = [d for d in range(1, x.ndim) if d != dim + 1]
            own = jnp.expand_dims(buffers.is_own, others)
            arrays[at] = jnp.where(own, x, jnp.zeros((), x.dtype))
            dims[at] = 0
        made = jax.vmap(lambda *xs: bind_local(item.eqn, xs, shapes), dims)(*arrays)
        return [jnp.sum(x, axis=0, dtype=x.dtype) if is_sum else x for x in made]

    def multiply(self, item: FlatOp, arrays: list[Any], shape: tuple[int, ...]) -> Any:
        """Multiply sorted rows by the matrix of their expert, or sum their products.

        Args:
          item: the product.
          arrays: rows, [parts, …], and matrices or other rows.
          shape: shape of the result, of a part of the rows.
        """
        sizes, spans = self.of(item).sizes, self.emitter.spans(item)
        if spans[1] is None:
            numbers = item.eqn.params["ragged_dot_dimension_numbers"]
            (d,) = numbers.rhs_group_dimensions
            before, after = arrays[1].shape[:d], arrays[1].shape[d + 1 :]
            split = jnp.reshape(arrays[1], (*before, len(sizes), -1, *after))
            arrays[1], shape = jnp.moveaxis(split, d, 0), (len(sizes), *shape)
        blocks = Blocks(self.emitter.groups)
        return blocks.multiply(item.eqn, arrays, sizes, spans, shape)

    def shape(self, value: int, buffers: Buffers) -> tuple[int, ...]:
        """Return the shape of a value in a part."""
        tokens = self.emitter.tokens
        state = tokens.flow.states.get(value)
        shape = tokens.flat.program.values[value].shape
        if not _is_sorted(state, tokens):
            return shape
        return *shape[: state.span.dim], buffers.size, *shape[state.span.dim + 1 :]

    def send(self, item: FlatOp, index: RowsState) -> Any:
        """Look up, or write, rows of tokens, or those that blocks send.

        Args:
          item: the look-up, or the scatter.
          index: state of its positions.
        """
        tokens, at = self.emitter.tokens, index.at
        flow, is_lookup = tokens.flow, item.op.traits.kind is OpKind.LOOKUP
        ran, (result,) = flow.ran[item.op.id], item.results
        assert at is not None
        is_there, count = at.order is not None, self.emitter.blocks.count
        buffers = self.of(item)
        sent = buffers.at.size
        spans = [s.span for s in (*ran.uses, *ran.results) if isinstance(s, RowsState)]
        arrays = []
        for i, v in enumerate(item.operands):
            if i != 1 and _is_sorted(flow.states.get(v), tokens):
                rows = self.rows(v, buffers, spans[i].dim)
                x = buffers.to_blocks(rows, spans[i].dim)
            else:
                x = whole_of(self.emitter.read(v))
                if i == 1:
                    x = buffers.places(x) if is_there else buffers.positions(x)
                elif (i == 0) is is_there:
                    x = _repeated(x, spans[i].dim, sent)
            arrays.append(x)
        params = dict(item.eqn.params)
        if is_there or not is_lookup:
            params["mode"] = lax.GatherScatterMode.FILL_OR_DROP
            params |= {"fill_value": 0} if is_lookup else {"indices_are_sorted": False}
        if not is_lookup and not is_there:
            start, limit = arrays[0], arrays[0].shape[spans[0].dim]
            arrays[0] = jnp.zeros_like(start)
            arrays[1] = buffers.owned(arrays[1], limit)
            is_zero = getattr(flow.states.get(item.operands[0]), "is_zero", False)
            if item.op.traits.reducer and not is_zero:
                arrays[0] = jnp.where(self.number == 0, start, arrays[0])
        made, whole = spans.pop(), tokens.flat.program.values[result].shape
        is_sent = _is_rows(tokens, result)
        size = (sent if is_sent else whole[made.dim]) // count
        shape = *whole[: made.dim], size, *whole[made.dim + 1 :]
        eqn = item.eqn.replace(params=params)
        found = self.emitter.blocks.lookup(eqn, arrays, spans, made, shape)
        return buffers.to_parts(found, made.dim) if is_sent else found


_SUMMED = {OpKind.REDUCTION: 0, OpKind.CONTRACTION: 0, OpKind.SCATTER: 2}
"""Kind of op → the operand whose zeros add nothing to a sum over rows."""


def _summed(tokens: SortedTokens, item: FlatOp) -> tuple[int, int]:
    """Return the operand that an op sums over sorted rows, and its dim of rows.

    Raises:
      MicrobatchError: it is no sum.
    """
    at = _SUMMED.get(item.op.traits.kind)
    states = (tokens.flow.states[v] for v in item.results)
    if at is not None and all(getattr(s, "reducer", "") == "sum" for s in states):
        use = tokens.flow.ran[item.op.id].uses[at]
        if _is_sorted(use, tokens):
            return at, use.span.dim
    raise MicrobatchError(
        f"`{item.op.name}` of tokens that are sorted by expert is no sum.",
        where=str(item.op.source),
        numbers="experts in parts",
        fix="divide no experts.",
    )


def _is_sorted(state: State | None, tokens: SortedTokens) -> TypeGuard[RowsState]:
    """Tell whether a state is of rows that are sorted by expert."""
    return isinstance(state, RowsState) and state.order in tokens.experts


def _is_rows(tokens: SortedTokens, value: int) -> bool:
    """Whether a value is of sorted rows, and no positions."""
    state = tokens.flow.states.get(value)
    return _is_sorted(state, tokens) and state.at is None


def _is_count(tokens: SortedTokens, item: FlatOp) -> bool:
    """Whether an op counts rows by expert."""
    return all(tokens.counted(v) is not None for v in item.results)


def _is_inside(tokens: SortedTokens, item: FlatOp) -> bool:
    """Whether an op runs in rounds."""
    if item.regions or item.op.name == "sort" or _is_count(tokens, item):
        return False
    return any(_is_rows(tokens, v) for v in (*item.operands, *item.results))


def _repeated(x: Any, dim: int, rows: int) -> Any:
    """Return an array whose rows are all the same with another number of them."""
    row = lax.slice_in_dim(x, 0, 1, axis=dim)
    return jnp.broadcast_to(row, (*x.shape[:dim], rows, *x.shape[dim + 1 :]))
