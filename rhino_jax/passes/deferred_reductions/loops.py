"""Scans with unreduced carries, which are reduced once after the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rhino_jax._compat import jaxpr_consts, open_jaxpr
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.ir.program import Op
from rhino_jax.passes.deferred_reductions.values import UnreducedValue, zeros
from rhino_jax.rewrite.emit import scan_like


if TYPE_CHECKING:
    from rhino_jax.passes.deferred_reductions.emit import DeferredEmitter


Parts = tuple[Any, dict[int, Any]]
"""(reduced part of a value or None, unreduced part by index of its group)."""


def run(
    runner: DeferredEmitter, op: Op, eqn: Any, operands: Sequence[UnreducedValue]
) -> list[UnreducedValue]:
    """Run a scan, some of whose carries and stacked results are unreduced.

    Args:
      runner: emitter of the program.
      op: the scan.
      eqn: its equation.
      operands: its operands.
    """
    (body,), call = closed_region_jaxprs(eqn), op.call
    inner, inner_consts = open_jaxpr(body), jaxpr_consts(body)
    assert call is not None
    (region,) = call.regions
    consts = [_same(v) for v in call.consts(operands)]
    stacks = [v.closed() for v in call.sliced(operands)]
    wanted = [runner.held_open(v) for v in call.carries(region.inputs)]
    kept = [runner.held_open(v) for v in call.stacked(region.outputs)]
    avals = [v.aval for v in inner.invars]

    def step(carries: list[Parts], slices: Sequence[Any]) -> tuple[Any, Any]:
        entering = [
            UnreducedValue(aval, *carry)
            for aval, carry in zip(call.carries(avals), carries, strict=True)
        ]
        sliced = [
            UnreducedValue(aval, x)
            for aval, x in zip(call.sliced(avals), slices, strict=True)
        ]
        outs = runner.region(region, inner, inner_consts, [*consts, *entering, *sliced])
        leaving = []
        for v, groups, entered in zip(outs, wanted, carries, strict=False):
            plain, opened = _parts(v, groups, runner)
            if plain is None and entered[0] is not None:
                plain = zeros(v.aval, ())
            leaving.append((plain, opened))
        made = [
            _made(v, groups) for v, groups in zip(call.stacked(outs), kept, strict=True)
        ]
        return leaving, made

    init = _init(runner, call.carries(operands), wanted)
    init = _filled(step, init, stacks, call.carries(avals))
    ends, made = scan_like(eqn, step, init, stacks)
    results = [
        UnreducedValue(var.aval, *parts, maker=eqn)
        for var, parts in zip(eqn.outvars, ends, strict=False)
    ]
    for var, (plain, opened) in zip(call.stacked(eqn.outvars), made, strict=True):
        fronts = {
            g: _in_front(x, len(runner.groups[g].pieces)) for g, x in opened.items()
        }
        results.append(UnreducedValue(var.aval, plain, fronts, maker=eqn))
    return results


def _same(value: UnreducedValue) -> UnreducedValue:
    """Return a value in reduced form: outside of the loop, if all iterations read
    it."""
    return UnreducedValue(value.aval, value.closed(), is_zero=value.is_zero)


def _init(
    runner: DeferredEmitter,
    values: Sequence[UnreducedValue],
    wanted: Sequence[Sequence[int]],
) -> list[Parts]:
    """Return the initial carries of a scan.

    Args:
      runner: emitter of the program.
      values: the initial carries as operands.
      wanted: indices of the groups in which each carry stays unreduced.
    """
    found = [
        _parts(value, groups, runner)
        for value, groups in zip(values, wanted, strict=True)
    ]
    pairs = zip(values, found, strict=True)
    return [
        (None if opened and value.is_zero else plain, opened)
        for value, (plain, opened) in pairs
    ]


def _parts(
    value: UnreducedValue, groups: Sequence[int], runner: DeferredEmitter
) -> Parts:
    """Return a carry in parts.

    Args:
      value: the carry.
      groups: indices of the groups in which it stays unreduced.
      runner: emitter of the program.
    """
    if not groups:
        return value.closed(), {}
    if not set(value.open) <= set(groups):
        value = _same(value)
    opened = {
        g: value.open[g]
        if g in value.open
        else zeros(value.aval, runner.groups[g].pieces)
        for g in groups
    }
    return value.plain, opened


def _made(value: UnreducedValue, groups: Sequence[int]) -> Parts:
    """Return a stacked result of one iteration."""
    if not value.open or not set(value.open) <= set(groups):
        return value.closed(), {}
    return value.plain, dict(value.open)


def _filled(
    step: Any, init: list[Parts], stacks: Sequence[Any], avals: Sequence[Any]
) -> list[Parts]:
    """Add a reduced part of zero to each initial carry that the body adds one to."""
    slices = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacks]
    while True:
        leaving, _ = jax.eval_shape(step, init, slices)
        missing = [
            k
            for k, (before, after) in enumerate(zip(init, leaving, strict=True))
            if before[0] is None and after[0] is not None
        ]
        if not missing:
            break
        for k in missing:
            init[k] = zeros(avals[k], ()), init[k][1]
    return init


def _in_front(array: Any, count: int) -> Any:
    """Transpose (length, *pieces, …) to (*pieces, length, …)."""
    return jnp.moveaxis(array, 0, count)
