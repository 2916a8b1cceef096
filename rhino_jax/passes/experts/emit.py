"""Emit a program that sorts its tokens by expert in blocks: the pass, and the numbers
of blocks and parts that a program allows.

All that is done to a sorted row alone stays as it is. Where the experts are divided
into parts, it is done in each part, and rows of other parts' experts are zero when
results are put back in place, or summed.

The tokens that a program sorts by expert, and multiplies by its experts' matrices, are
what `microbatch.flow.orders` follows, for the whole batch at once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rhino_jax._compat import bind_eqn, without_dead_code
from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.rules.dot import RAGGED_DOTS, SHARED_ROWS
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.program import Program, RegionKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.ir.transform import EXPERTS, Transform, chosen, num_microbatches
from rhino_jax.passes.experts.moves import Blocks
from rhino_jax.passes.microbatch.flow.analysis import (
    Divided,
    FlowResult,
    OpenedRemat,
    analyse,
)
from rhino_jax.passes.microbatch.flow.ops import DimSizes
from rhino_jax.passes.microbatch.flow.states import (
    Partial,
    RowsState,
    candidates,
)
from rhino_jax.passes.program_pass import (
    ChoiceLimits,
    Gain,
    ProgramPass,
    Trial,
    TrialKind,
    read_choice,
)
from rhino_jax.passes.region_walk import run_region, run_regions
from rhino_jax.rewrite.emit import bind_local
from rhino_jax.rewrite.flat import FlatOp, FlatProgram, FlatRegion
from rhino_jax.rewrite.flatten import all_calls, flatten
from rhino_jax.rewrite.retraced import retraced


@dataclass(frozen=True, slots=True)
class SortedTokens:
    """The rows of a program that are sorted by expert.

    Attributes:
      flow: how values depend on the batch, and the orders of their rows.
      rows: size of the batch.
      experts: id of the keys of each sort → number of experts.
    """

    flow: FlowResult
    rows: int
    experts: Mapping[int, int]

    @property
    def flat(self) -> FlatProgram:
        """The program."""
        return self.flow.flat

    def order(self, value: int) -> int | None:
        """Return the keys by which a value's rows are sorted, or among whose sorted
        rows its elements are positions; None for other values."""
        state = self.flow.states.get(value)
        if not isinstance(state, RowsState):
            return None
        orders = {state.order, state.at.order if state.at else None}
        found = [order for order in orders if order in self.experts]
        return found[0] if found else None

    def counted(self, value: int) -> int | None:
        """Return the keys whose rows a value counts by expert; None for others."""
        state = self.flow.states.get(value)
        keys = state.counts if isinstance(state, Partial) else None
        return keys if keys in self.experts else None

    def changes(self, region: FlatRegion) -> bool:
        """Whether a region has rows that are sorted by expert, or counts of them."""
        return any(
            self.order(v) is not None or self.counted(v) is not None
            for item in region.ops
            for v in (*item.operands, *item.results)
        ) or any(self.changes(r) for item in region.ops for r in item.regions)


def sorted_tokens(closed: Any, program: Program) -> SortedTokens | None:
    """Find the tokens that a program sorts by expert.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
    Returns:
      None where it sorts none, or needs the order of all.
    """
    if not any(op.name in RAGGED_DOTS for op in program.ops):
        return None
    flat = flatten(program, closed, all_calls())
    count = num_microbatches(program.transforms)
    for whole, batch in candidates(flat):
        if whole % count:
            continue
        # The rows of one of the micro-batches: see `microbatch.emit`.
        rows, inputs = whole // count, dict[int, RowsState]()
        for value, state in batch.items():
            size, inner = state.span.size // count, state.span.inner * count
            span = replace(state.span, size=size, inner=inner)
            inputs[value] = replace(state, span=span)
        try:
            # Sums over the batch stay what they are, so none is waited for.
            flow = analyse(flat, inputs, DimSizes(rows, 0), lambda item: True)
        except (OpenedRemat, Divided):
            continue
        experts = dict(_experts(flow, flat.top))
        if experts:
            return SortedTokens(flow, rows, experts)
    return None


def _experts(flow: FlowResult, region: FlatRegion) -> list[tuple[int, int]]:
    """Return the keys, and the number of experts, of each product of sorted rows."""
    found: list[tuple[int, int]] = []
    for item in region.ops:
        if is_product(flow, item):
            *_, sizes = item.operands
            counts = flow.states[sizes]
            assert isinstance(counts, Partial) and counts.counts is not None
            (number,) = flow.flat.program.values[sizes].shape
            found.append((counts.counts, number))
        for inner in item.regions:
            found += _experts(flow, inner)
    return found


def is_product(flow: FlowResult, item: FlatOp) -> bool:
    """Whether an op multiplies sorted rows, each by its expert's matrix, or sums such
    products of rows by expert."""
    if item.op.name not in RAGGED_DOTS:
        return False
    rows = flow.states.get(item.operands[0])
    return isinstance(rows, RowsState) and rows.order is not None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "sizes", "own"],
    meta_fields=["dim"],
)
@dataclass(frozen=True, slots=True)
class InBlocks:
    """A value of a program that sorts in blocks.

    Attributes:
      x: its array.
      sizes: of counts by expert: those of each block, as `Blocks.sizes` has them.
      own: number of rows of the part's experts, as `Blocks.sort` has it.
      dim: the dim of the parts; None: the value is the same for all.
    """

    x: Any
    sizes: Any = None
    own: Any = None
    dim: int | None = None

    def moved(self, by: int) -> InBlocks:
        """Return the value with the dim of its parts shifted."""
        return self if self.dim is None else replace(self, dim=self.dim + by)


@dataclass(slots=True)
class BlocksEmitter:
    """Emitter of a program's ops.

    Attributes:
      tokens: the rows that it sorts by expert.
      blocks: how they, and the experts, are divided.
      env: value id → array, or `InBlocks`.
    """

    tokens: SortedTokens
    blocks: Blocks
    env: dict[int, Any] = field(default_factory=dict)

    def run(self, *arrays: Any) -> list[Any]:
        """Run the program on its inputs and constants."""
        return [_whole(x) for x in self.region(self.tokens.flat.top, arrays)]

    def region(self, region: FlatRegion, arrays: Sequence[Any]) -> list[Any]:
        """Run the ops of a region, and return its outputs."""
        run_region(region, arrays, self.env, self.item)
        return [self.read(v) for v in region.outputs]

    def read(self, value: int) -> Any:
        """Return the array, or record, of a value."""
        return self.tokens.flat.read(value, self.env)

    def item(self, item: FlatOp) -> list[Any]:
        """Run an op."""
        operands = [self.read(v) for v in item.operands]
        if item.regions:
            if any(map(self.tokens.changes, item.regions)):
                return self.regions(item, operands)
            return bind_eqn(item.eqn, [*map(_whole, operands)], item.eqn.params)
        results = self.plain(item, operands)
        return [
            self.counts(v, x, operands) if self.tokens.counted(v) is not None else x
            for v, x in zip(item.results, results, strict=True)
        ]

    def regions(self, item: FlatOp, operands: list[Any]) -> list[Any]:
        """Run an op whose regions have rows in blocks."""
        call, is_scan = item.call, item.is_scan

        def run(block: FlatRegion, inputs: Sequence[Any]) -> list[Any]:
            if is_scan:
                first = call.first_slice
                slices = (_moved(x, -1) for x in call.sliced(inputs))
                inputs = [*inputs[:first], *slices]
            found = self.region(block, inputs)
            if call.kind is RegionKind.WHILE and block is item.regions[0]:
                return [*map(_whole, found)]
            return found

        made = run_regions(item, operands, run)
        count = call.num_carry if is_scan else len(made)
        return [*made[:count], *(_moved(x, 1) for x in made[count:])]

    def counts(self, value: int, x: Any, operands: Iterable[Any]) -> InBlocks:
        """Return counts of rows by expert, with those of each block."""
        made = (o.sizes for o in operands if isinstance(o, InBlocks))
        sizes = next((s for s in made if s is not None), None)
        if sizes is None:
            keys = self.tokens.counted(value)
            assert keys is not None
            number = self.tokens.experts[keys]
            sizes = self.blocks.sizes(_whole(self.read(keys)), number, x.dtype)
        return InBlocks(x, sizes.astype(x.dtype))

    def plain(self, item: FlatOp, operands: list[Any]) -> list[Any]:
        """Run an op without regions."""
        tokens = self.tokens
        flow, orders = tokens.flow, [*map(tokens.order, item.operands)]
        if item.op.name == "sort":
            order = tokens.order(item.results[0])
            keys = next((k for k in (*orders, order) if k is not None), None)
            if keys is not None:
                return self.sort(item, operands, keys)
        if is_product(flow, item) and orders[0] is not None:
            return [self.multiply(item, operands)]
        kind = item.op.traits.kind
        if kind in (OpKind.LOOKUP, OpKind.SCATTER) and len(operands) > 1:
            index = flow.states[item.operands[1]]
            if isinstance(index, RowsState) and index.at and orders[1] is not None:
                return [self.lookup(item, operands)]
        if kind is OpKind.IDENTITY and len(operands) == len(item.results):
            made = bind_eqn(item.eqn, [*map(_whole, operands)], item.eqn.params)
            return [
                replace(o, x=x) if isinstance(o, InBlocks) else x
                for o, x in zip(operands, made, strict=True)
            ]
        return self.each_part(item, operands)

    def each_part(self, item: FlatOp, operands: list[Any]) -> list[Any]:
        """Run an op in each part of the experts, where its operands differ there."""
        arrays, dims, own = _apart(operands)
        if own is None:
            return item.bind(arrays)
        states = [self.tokens.flow.states[v] for v in item.results]
        if not any(isinstance(s, Partial) for s in states):
            made = jax.vmap(lambda *xs: item.bind(xs), dims)(*arrays)
            return [InBlocks(x, own=own, dim=0) for x in made]
        at = _SUMMED.get(item.op.traits.kind)
        use = None if at is None else self.tokens.flow.ran[item.op.id].uses[at]
        is_sum = all(isinstance(s, Partial) and s.reducer == "sum" for s in states)
        if at is None or not isinstance(use, RowsState) or not is_sum:
            raise MicrobatchError(
                f"`{item.op.name}` of tokens that are sorted by expert is no sum.",
                where=str(item.op.source),
                numbers="experts in parts",
                fix="divide no experts.",
            )
        arrays[at], dims[at] = self.owned(arrays[at], dims[at], own, use.span), 0
        made = jax.vmap(lambda *xs: item.bind(xs), dims)(*arrays)
        return [jnp.sum(x, axis=0, dtype=x.dtype) for x in made]

    def owned(self, x: Any, dim: int | None, own: Any, span: AxisSpan) -> Any:
        """Return [parts, …] sorted rows, those of other parts' experts zero.

        Args:
          x: the rows.
          dim: the dim of their parts; None: they are the same in all.
          own: as of `Blocks.sort`.
          span: the dim of the rows in a part.
        """
        x = self.blocks.parted(x, dim)
        return _masked(x, self.blocks.own(own, x.shape[span.dim + 1]), span)

    def sort(self, item: FlatOp, operands: list[Any], keys: int) -> list[Any]:
        """Sort the rows of each block by expert, or positions in that order."""
        arrays, _, own = _apart(operands)
        if own is None and self.tokens.order(item.operands[0]) is None:
            *made, own = self.blocks.sort(item.eqn, arrays, self.tokens.experts[keys])
        else:
            made = self.blocks.sort_again(item.eqn, arrays)
        if self.blocks.parts == 1:
            return made
        return [InBlocks(x, own=own, dim=0) for x in made]

    def lookup(self, item: FlatOp, operands: list[Any]) -> Any:
        """Look up rows at positions in the order of their block, or write them."""
        flow, blocks = self.tokens.flow, self.blocks
        ran, (result,) = flow.ran[item.op.id], item.results
        spans = [s.span for s in (*ran.uses, *ran.results) if isinstance(s, RowsState)]
        made = spans.pop()
        whole = flow.flat.program.values[result].shape
        shape = made.resized(whole, made.size // blocks.count)

        def run(*parts: Any) -> Any:
            return bind_local(item.eqn, parts, [shape])[0]

        def in_part(*parts: Any) -> Any:
            return blocks.lookup(run, parts, spans, made)

        arrays, dims, own = _apart(operands)
        if own is None:
            return in_part(*arrays)
        if self.tokens.order(result) is not None:
            return InBlocks(jax.vmap(in_part, dims)(*arrays), own=own, dim=0)
        if item.op.traits.kind is OpKind.LOOKUP:
            found = jax.vmap(in_part, dims)(*arrays)
            at = blocks.parted(arrays[1], dims[1])
            found = _masked(found, blocks.are_own(at, own), made)
            return jnp.sum(found, axis=0, dtype=found.dtype)
        start, arrays[0] = arrays[0], jnp.zeros_like(arrays[0])
        arrays[2], dims[2] = self.owned(arrays[2], dims[2], own, spans[2]), 0
        total = jnp.sum(jax.vmap(in_part, dims)(*arrays), axis=0, dtype=start.dtype)
        return start + total if item.op.traits.reducer else total

    def multiply(self, item: FlatOp, operands: list[Any]) -> Any:
        """Multiply sorted rows by the matrix of their expert, or sum their products."""
        uses = self.tokens.flow.ran[item.op.id].uses
        spans = [u.span.dim if isinstance(u, RowsState) else None for u in uses[:2]]
        *factors, counts = operands
        arrays, dims, own = _apart(factors)
        parts = self.blocks.parts
        if parts > 1:
            arrays = [
                x if at is None else self.blocks.parted(x, d)
                for x, d, at in zip(arrays, dims, spans, strict=True)
            ]
        shared = jax.named_scope(f"{SHARED_ROWS}{parts}")
        with shared if parts > 1 else contextlib.nullcontext():
            found = self.blocks.multiply(item.eqn, arrays, counts.sizes, spans)
        if own is None or spans[1] is not None:
            return found
        return InBlocks(found, own=own, dim=0)


_SUMMED = {OpKind.REDUCTION: 0, OpKind.CONTRACTION: 0, OpKind.SCATTER: 2}
"""Kind of op → the operand whose zeros add nothing to a sum over rows."""


def _whole(x: Any) -> Any:
    return x.x if isinstance(x, InBlocks) else x


def _moved(x: Any, by: int) -> Any:
    return x.moved(by) if isinstance(x, InBlocks) else x


def _masked(x: Any, mask: Any, span: AxisSpan) -> Any:
    """Return [parts, …] rows, zero where a mask [parts, rows] is false."""
    shape = [1] * x.ndim
    shape[0], shape[span.dim + 1] = mask.shape
    return jnp.where(jnp.reshape(mask, shape), x, jnp.zeros((), x.dtype))


def _apart(operands: Iterable[Any]) -> tuple[list[Any], list[int | None], Any]:
    """Return the arrays of values, the dims of their parts, and `own` of one that has
    parts; None where none has."""
    records = [x if isinstance(x, InBlocks) else InBlocks(x) for x in operands]
    own = next((r.own for r in records if r.dim is not None), None)
    return [r.x for r in records], [r.dim for r in records], own


@dataclass(frozen=True, slots=True)
class ExpertsChoice:
    """Options of the pass.

    Attributes:
      count: number of blocks of tokens that are sorted by themselves.
      parts: number of parts of the experts, each with an order of its own.
    """

    count: int
    parts: int = 1


def sort_in_blocks(closed: Any, program: Program, choice: str) -> Any:
    """Rewrite a program to sort its tokens by expert in blocks.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: JSON, as `{"count": 8, "parts": 1}`; see `ExpertsChoice`.
    Returns:
      A closed jaxpr of the same arguments and results. Results equal those of the
      original program except for the order in which floats are added.
    Raises:
      MicrobatchError: the program sorts no tokens that may be, or not so.
    """
    read = read_choice(ExpertsChoice, choice, "the choice of blocks of tokens")
    tokens = sorted_tokens(closed, program)
    if tokens is None or tokens.rows % read.count or _odd(tokens.experts, read.parts):
        raise MicrobatchError(
            f"`{program.name}` sorts no tokens by expert that can be divided so.",
            where=f"`{program.name}`",
            numbers=choice,
            fix="sort them all at once.",
        )
    emitter = BlocksEmitter(tokens, Blocks(read.count, read.parts))
    return without_dead_code(retraced(closed, emitter.run))


def _odd(experts: Mapping[int, int], parts: int) -> bool:
    return any(number % parts for number in experts.values())


def _choices(traced: Traced, limits: ChoiceLimits) -> Iterator[Transform]:
    """Yield blocks of tokens with all experts, one block for each device along some
    mesh axes; then parts of the experts, likewise."""
    tokens = sorted_tokens(traced.closed_jaxpr, traced.program)
    counts = sorted(limits.counts)
    if tokens is None or not counts:
        return
    for count in counts:
        if tokens.rows % count == 0:
            yield chosen(EXPERTS, {"count": count, "parts": 1})
    for parts in counts:
        if not _odd(tokens.experts, parts):
            count = math.gcd(tokens.rows, counts[-1] // parts)
            yield chosen(EXPERTS, {"count": count, "parts": parts})


def _label(choice: Transform) -> str:
    count, parts = choice.chosen["count"], choice.chosen["parts"]
    words = [f"tokens sorted in {count} blocks"] if count > 1 else []
    return ", ".join([*words, *([f"experts in {parts} parts"] if parts > 1 else [])])


PASS = ProgramPass(
    EXPERTS,
    sort_in_blocks,
    _choices,
    Trial(TrialKind.EACH, _label, "grouped", "sorted in blocks", Gain.TIME),
)
