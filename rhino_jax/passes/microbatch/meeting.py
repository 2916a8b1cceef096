"""FLOPs of ops that couple the rows of the batch and run on all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rhino_jax.ir.axes import AxisSpan, follow
from rhino_jax.passes.microbatch.flow.analysis import FlowResult
from rhino_jax.passes.microbatch.flow.states import RowsState, is_outside


def meeting_flops(
    found: FlowResult, outside: Sequence[Sequence[int]], flops: Mapping[int, float]
) -> float:
    """Return the FLOPs of ops that run on the whole batch, except those that are cheap.

    Args:
      found: the analysis.
      outside: ids of the ops that run outside of loops.
      flops: FLOPs of each op by id.
    """
    run = {op for ops in outside for op in ops}
    at: dict[int, AxisSpan] = {}  # value known in full → its batch dim
    total = 0.0
    for item in found.flat.top.ops:
        states = [found.states[v] for v in item.results]
        if item.op.id not in run or not all(map(is_outside, states)):
            continue
        held = [(i, _span(found, v, at)) for i, v in enumerate(item.operands)]
        cuts = [(i, span) for i, span in held if span is not None]
        if not cuts:
            continue
        total += flops[item.op.id]
        rule = item.op.rule
        if rule is None:
            continue
        for i, span in cuts:
            for value, layout in zip(item.results, rule.results, strict=True):
                made = follow(rule, rule.operands[i], span, layout)
                if made is not None:
                    at[value] = made
    return total


def _span(found: FlowResult, value: int, at: Mapping[int, AxisSpan]) -> AxisSpan | None:
    """Return the batch dim of a value; None where it has none."""
    state = found.states[value]
    return state.span if isinstance(state, RowsState) else at.get(value)
