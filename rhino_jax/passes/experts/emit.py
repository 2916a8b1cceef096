"""Emit a program that sorts its tokens by expert in blocks.

The tokens that a program sorts by expert, and multiplies by its experts' matrices, are
what `microbatch.flow.orders` follows, for the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from rhino_jax._compat import bind_eqn
from rhino_jax.frontend.rules.dot import RAGGED_DOTS
from rhino_jax.ir.program import Program, RegionKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.ir.transform import num_microbatches
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
from rhino_jax.passes.region_walk import run_region, run_regions
from rhino_jax.rewrite.flat import FlatOp, FlatProgram, FlatRegion
from rhino_jax.rewrite.flatten import all_calls, flatten


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
    data_fields=["x", "sizes"],
    meta_fields=["dim"],
)
@dataclass(frozen=True, slots=True)
class InBlocks:
    """A value of a program that sorts in blocks.

    Attributes:
      x: its array.
      sizes: of counts by expert: those of each block, [blocks, experts]. Where experts
        are in parts, sorted rows have those of their order, too.
      dim: of rows that were sent to parts, the dim of the parts, after that of rounds;
        None: of other values.
    """

    x: Any
    sizes: Any = None
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
        return [whole_of(x) for x in self.region(self.tokens.flat.top, arrays)]

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
            return bind_eqn(item.eqn, [*map(whole_of, operands)], item.eqn.params)
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
                return [*map(whole_of, found)]
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
            sizes = self.blocks.sizes(whole_of(self.read(keys)), number, x.dtype)
        return InBlocks(x, sizes.astype(x.dtype))

    def plain(self, item: FlatOp, operands: list[Any]) -> list[Any]:
        """Run an op without regions."""
        tokens, arrays = self.tokens, [*map(whole_of, operands)]
        orders = [*map(tokens.order, (*item.operands, *item.results))]
        kind, index = item.op.traits.kind, item.operands[1:2]
        if item.op.name == "sort" and any(k is not None for k in orders):
            return self.blocks.sort(item.eqn, arrays)
        if is_product(tokens.flow, item):
            return [self.multiply(item, arrays[:2], operands[2])]
        if kind in (OpKind.LOOKUP, OpKind.SCATTER) and index and orders[1] is not None:
            state = tokens.flow.states[index[0]]
            if isinstance(state, RowsState) and state.at:
                return [self.lookup(item, arrays)]
        made = item.bind(arrays)
        if kind is OpKind.IDENTITY and len(operands) == len(item.results):
            return [
                replace(o, x=x) if isinstance(o, InBlocks) else x
                for o, x in zip(operands, made, strict=True)
            ]
        return made

    def lookup(self, item: FlatOp, arrays: list[Any]) -> Any:
        """Look up rows at positions in the order of their block, or write them."""
        flow, blocks = self.tokens.flow, self.blocks
        ran, (result,) = flow.ran[item.op.id], item.results
        spans = [s.span for s in (*ran.uses, *ran.results) if isinstance(s, RowsState)]
        made = spans.pop()
        whole = flow.flat.program.values[result].shape
        shape = made.resized(whole, made.size // blocks.count)
        return blocks.lookup(item.eqn, arrays, spans, made, shape)

    def multiply(self, item: FlatOp, factors: list[Any], counts: InBlocks) -> Any:
        """Multiply sorted rows by the matrix of their expert, or sum their products."""
        shape = item.eqn.outvars[0].aval.shape
        return self.blocks.multiply(
            item.eqn, factors, counts.sizes, self.spans(item), shape
        )

    def spans(self, item: FlatOp) -> list[int | None]:
        """Return the dims of rows in the factors of a product; None: it has none."""
        uses = self.tokens.flow.ran[item.op.id].uses[:2]
        return [u.span.dim if isinstance(u, RowsState) else None for u in uses]


def whole_of(x: Any) -> Any:
    """Return the array of a value."""
    return x.x if isinstance(x, InBlocks) else x


def _moved(x: Any, by: int) -> Any:
    return x.moved(by) if isinstance(x, InBlocks) else x
