"""Analysis of a batch of one row, which runs as one micro-batch.

Dims of size one have no factors, so the position of the batch is unknown; it is not
needed either: every value that depends on data belongs to the micro-batch, except for
the update of state. A long sequence is such a batch: its pipeline stages run slices of
it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from rhino_jax.ir.program import RegionKind
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.microbatch.flow.analysis import FlowResult
from rhino_jax.passes.microbatch.flow.ops import DimSizes, Ran
from rhino_jax.passes.microbatch.flow.states import (
    Partial,
    RowsState,
    State,
    WholeState,
)
from rhino_jax.rewrite.flat import FlatOp, FlatProgram


UPDATING = frozenset({
    OpKind.ELEMENTWISE, OpKind.EXPONENTIAL, OpKind.CONVERSION, OpKind.IDENTITY,
    OpKind.BROADCAST,
})  # fmt: skip
"""Kinds of ops that an optimizer applies to a complete gradient."""


def analyse_one(
    flat: FlatProgram, inputs: Mapping[int, RowsState], sizes: DimSizes
) -> FlowResult:
    """Return the analysis of a program whose batch is one row.

    Args:
      flat: the program.
      inputs: inputs that hold the batch, by value id.
      sizes: size of the batch.
    """
    found = FlowResult(flat, sizes)
    states = found.states
    states.update(dict.fromkeys(flat.consts, WholeState()))
    states.update({v: inputs.get(v, WholeState()) for v in flat.top.inputs})
    after = _after(flat, inputs)
    of_update = {
        v for item in flat.top.ops if item.op.id in after for v in item.operands
    }
    for item in flat.top.ops:
        uses = tuple(states[v] for v in item.operands)
        made: list[State] = [WholeState()] * len(item.results)
        if item.op.id in after:
            made = [WholeState(1)] * len(item.results)
        elif not all(s == WholeState() for s in uses):
            made = [
                Partial("sum")
                if v in of_update and _is_float(flat, v)
                else WholeState(0, is_inside=True)
                for v in item.results
            ]
        found.keep(item, Ran(uses, tuple(made)))
    return found


def _is_float(flat: FlatProgram, value: int) -> bool:
    return "float" in flat.program.values[value].dtype


def _after(flat: FlatProgram, inputs: Collection[int]) -> set[int]:
    """Return the ids of the ops that run once per step, after the micro-batch.

    These are updates of state, ops that read them, and ops on gradients alone whose
    results the step returns.
    """
    ends = [*zip(flat.program.outputs, flat.top.outputs, strict=True)]
    state = [v for end, v in ends if end.state_of is not None]
    shapes = {flat.program.values[v].shape for v in state}
    updates = _made_by_updates(flat, state, shapes)
    metrics = _made_by_updates(flat, [v for _, v in ends], shapes)
    data, late, found = {*inputs}, set[int](), set[int]()
    read = {v for item in flat.top.ops if item.op.id in updates for v in item.operands}
    for item in flat.top.ops:
        of_data = data.intersection(item.operands)
        if not of_data:
            continue
        data.update(item.results)
        is_metric = item.op.id in metrics and of_data <= read | late
        if item.op.id in updates or is_metric or not late.isdisjoint(of_data):
            late.update(item.results)
            found.add(item.op.id)
    return found


def _made_by_updates(
    flat: FlatProgram, values: Iterable[int], shapes: Collection[tuple[int, ...]]
) -> set[int]:
    """Return ids of the elementwise ops and norms between gradients and some results.

    Args:
      flat: the program.
      values: ids of the results.
      shapes: shapes of the state.
    """
    found, queue = set[int](), [*values]
    while queue:
        item = flat.maker.get(queue.pop())
        if item is not None and item.op.id not in found and _is_update(item, shapes):
            found.add(item.op.id)
            queue += item.operands
    return found


def _is_update(item: FlatOp, shapes: Collection[tuple[int, ...]]) -> bool:
    """Whether an op may belong to an optimizer's update.

    Args:
      item: the op.
      shapes: shapes of the state.
    """
    if item.op.call is not None:
        return item.op.call.kind is RegionKind.COND  # skips non-finite updates
    if item.op.traits.kind is OpKind.REDUCTION:
        shape, made = item.eqn.invars[0].aval.shape, item.eqn.outvars[0].aval.shape
        return math.prod(made) == 1 and shape in shapes
    # Only automatic differentiation emits `add_any`, to sum cotangents.
    return item.op.traits.kind in UPDATING and item.op.name != "add_any"
