"""Emit loops, conditionals and recomputed regions on a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jax import lax

from rhino_jax._compat import (
    bind_eqn,
    captured_as_inputs,
    hide_frames,
    open_jaxpr,
    retrace,
)
from rhino_jax.frontend.regions import closed_region_jaxprs, with_jaxprs
from rhino_jax.ir.program import RegionKind
from rhino_jax.passes.microbatch.flow.analysis import FlowResult
from rhino_jax.passes.microbatch.flow.states import RowsState, State
from rhino_jax.rewrite.emit import scan_like
from rhino_jax.rewrite.flat import FlatOp, FlatRegion


hide_frames(__file__)


class RegionOps(Protocol):
    """Emitter of ops on a micro-batch, as regions use it; see `piece.PieceEmitter`."""

    found: FlowResult

    def block(self, block: FlatRegion, arrays: Sequence[Any]) -> list[Any]: ...

    def coerced(self, x: Any, state: State, use: State) -> Any: ...


def _run(
    inside: RegionOps, block: FlatRegion, arrays: Sequence[Any], leaves: Sequence[State]
) -> list[Any]:
    """Run a region and return its outputs, converted to the given states."""
    results = inside.block(block, arrays)
    states = [inside.found.states[v] for v in block.outputs]
    return [
        inside.coerced(x, state, use)
        for x, state, use in zip(results, states, leaves, strict=True)
    ]


def _scan(inside: RegionOps, item: FlatOp, arrays: Sequence[Any]) -> list[Any]:
    call, params = item.op.call, item.eqn.params
    assert call is not None
    first = call.num_consts + call.num_carry
    uses = inside.found.flow.ran[item.op.id].uses[first:]
    if any(isinstance(use, RowsState) and use.span.dim == 0 for use in uses):
        return bind_eqn(item.eqn, arrays, {**params, "length": arrays[first].shape[0]})
    consts, init = arrays[: call.num_consts], list(arrays[call.num_consts : first])
    (block,) = item.regions
    states = inside.found.states
    results = inside.found.flow.ran[item.op.id].results
    stacked = [states[v] for v in block.outputs[call.num_carry :]]

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        leaves = (*results[: call.num_carry], *stacked)
        found = _run(inside, block, [*consts, *carry, *xs], leaves)
        return found[: call.num_carry], found[call.num_carry :]

    carry, stacks = scan_like(item.eqn, body, init, list(arrays[first:]))
    return [*carry, *stacks]


def _while(inside: RegionOps, item: FlatOp, arrays: Sequence[Any]) -> list[Any]:
    call = item.op.call
    assert call is not None
    conds = call.num_cond_consts
    first = conds + call.num_consts
    leaves = inside.found.flow.ran[item.op.id].results

    def goes_on(carry: Iterable[Any]) -> Any:
        (found,) = inside.block(item.regions[0], [*arrays[:conds], *carry])
        return found

    def body(carry: Iterable[Any]) -> list[Any]:
        enters = [*arrays[conds:first], *carry]
        return _run(inside, item.regions[1], enters, leaves)

    return list(lax.while_loop(goes_on, body, list(arrays[first:])))


def _cond(inside: RegionOps, item: FlatOp, arrays: Sequence[Any]) -> list[Any]:
    leaves = inside.found.flow.ran[item.op.id].results

    def branch(block: FlatRegion) -> Callable[..., list[Any]]:
        return lambda *xs: _run(inside, block, xs, leaves)

    return list(lax.switch(arrays[0], [*map(branch, item.regions)], *arrays[1:]))


def _call(inside: RegionOps, item: FlatOp, arrays: Sequence[Any]) -> list[Any]:
    """Bind a recomputed region with its parameters, captured arrays as operands."""
    (body,) = closed_region_jaxprs(item.eqn)
    leaves = inside.found.flow.ran[item.op.id].results

    def run(*xs: Any) -> list[Any]:
        return _run(inside, item.regions[0], xs, leaves)

    new, captured = retrace(run, open_jaxpr(body), [tuple(x.shape) for x in arrays])
    params = dict(with_jaxprs(item.eqn, [captured_as_inputs(new, len(arrays))]))
    barred = params.get("prevent_cse")
    if isinstance(barred, tuple):
        params["prevent_cse"] = (*barred, *(False for _ in captured))
    return bind_eqn(item.eqn, [*arrays, *captured], params)


REGIONS: Mapping[
    RegionKind, Callable[[RegionOps, FlatOp, Sequence[Any]], list[Any]]
] = {
    RegionKind.SCAN: _scan,
    RegionKind.WHILE: _while,
    RegionKind.COND: _cond,
    RegionKind.CALL: _call,
}
