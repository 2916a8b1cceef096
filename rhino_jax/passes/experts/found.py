"""Find the tokens that a program sorts by expert, and multiplies by its experts'
matrices: what `microbatch.flow.orders` follows, for the whole batch at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rhino_jax.frontend.rules.dot import RAGGED_DOTS
from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import num_microbatches
from rhino_jax.passes.microbatch.flow.analysis import (
    Divided,
    FlowResult,
    OpenedRemat,
    analyse,
)
from rhino_jax.passes.microbatch.flow.batch import Inputs, candidates
from rhino_jax.passes.microbatch.flow.ops import DimSizes
from rhino_jax.passes.microbatch.flow.states import Partial, RowsState
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
    for rows, inputs in _batches(flat):
        try:
            # Sums over the batch stay what they are, so none is waited for.
            flow = analyse(flat, inputs, DimSizes(rows, 0), lambda item: True)
        except (OpenedRemat, Divided):
            continue
        experts = dict(_experts(flow, flat.top))
        if experts:
            return SortedTokens(flow, rows, experts)
    return None


def _batches(flat: FlatProgram) -> Iterator[tuple[int, Inputs]]:
    """Yield candidates for the batch; in micro-batches, for the rows of one."""
    count = num_microbatches(flat.program.transforms)
    for rows, inputs in candidates(flat):
        if rows % count == 0:
            least = {
                value: replace(state, span=_of_one(state.span, count))
                for value, state in inputs.items()
            }
            yield rows // count, least


def _of_one(span: AxisSpan, count: int) -> AxisSpan:
    """Return the rows of one of some micro-batches: see `microbatch.emit.pieces`."""
    return replace(span, size=span.size // count, inner=span.inner * count)


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
