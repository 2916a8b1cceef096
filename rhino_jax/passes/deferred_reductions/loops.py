"""Scans with unreduced carries, which are reduced once after the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rhino_jax._compat import jaxpr_consts, open_jaxpr, scan_counts
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.ir.program import Op
from rhino_jax.passes.deferred_reductions.values import (
    RegionRunner,
    UnreducedValue,
    zeros,
)
from rhino_jax.rewrite.emit import scan_like


Parts = tuple[Any, dict[int, Any]]
"""(reduced part of a value or None, unreduced part by index of its group)."""


def run(
    runner: RegionRunner, op: Op, eqn: Any, operands: Sequence[UnreducedValue]
) -> list[UnreducedValue]:
    """Run a scan, some of whose carries and stacked results are unreduced.

    Args:
      runner: emitter of the program.
      op: the scan.
      eqn: its equation.
      operands: its operands.
    """
    (body,) = closed_region_jaxprs(eqn)
    inner, inner_consts = open_jaxpr(body), jaxpr_consts(body)
    num_consts, num_carry = scan_counts(eqn.params)
    first = num_consts + num_carry
    assert op.call is not None
    (region,) = op.call.regions
    consts = [_same(v) for v in operands[:num_consts]]
    stacks = [v.closed() for v in operands[first:]]
    wanted = [runner.held_open(region.inputs[num_consts + k]) for k in range(num_carry)]
    kept = [runner.held_open(v) for v in region.outputs[num_carry:]]

    def step(carries: list[Parts], slices: Sequence[Any]) -> tuple[Any, Any]:
        entering = [
            UnreducedValue(var.aval, *carry)
            for var, carry in zip(inner.invars[num_consts:], carries, strict=False)
        ]
        sliced = [
            UnreducedValue(var.aval, x)
            for var, x in zip(inner.invars[first:], slices, strict=True)
        ]
        outs = runner.region(region, inner, inner_consts, [*consts, *entering, *sliced])
        leaving = [
            _parts(v, groups, runner, entered[0] is not None)
            for v, groups, entered in zip(outs, wanted, carries, strict=False)
        ]
        made = [
            _made(v, groups) for v, groups in zip(outs[num_carry:], kept, strict=True)
        ]
        return leaving, made

    init = _init(runner, operands[num_consts:first], wanted)
    init = _filled(step, init, stacks, [v.aval for v in inner.invars[num_consts:first]])
    ends, made = scan_like(eqn, step, init, stacks)
    results = [
        UnreducedValue(var.aval, *parts, maker=eqn)
        for var, parts in zip(eqn.outvars, ends, strict=False)
    ]
    for var, (plain, opened) in zip(eqn.outvars[num_carry:], made, strict=True):
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
    runner: RegionRunner,
    values: Sequence[UnreducedValue],
    wanted: Sequence[Sequence[int]],
) -> list[Parts]:
    """Return the initial carries of a scan.

    Args:
      runner: emitter of the program.
      values: the initial carries as operands.
      wanted: indices of the groups in which each carry stays unreduced.
    """
    found: list[Parts] = []
    for value, groups in zip(values, wanted, strict=True):
        if not groups:
            found.append((value.closed(), {}))
            continue
        if not set(value.open) <= set(groups):
            value = _same(value)
        opened = {
            g: value.open[g]
            if g in value.open
            else zeros(value.aval, runner.groups[g].pieces)
            for g in groups
        }
        found.append((None if value.is_zero else value.plain, opened))
    return found


def _parts(
    value: UnreducedValue, groups: Sequence[int], runner: RegionRunner, has_plain: bool
) -> Parts:
    """Return a carry at the end of an iteration.

    Args:
      value: the carry.
      groups: indices of the groups in which it stays unreduced.
      runner: emitter of the program.
      has_plain: whether it has a reduced part at the start of an iteration.
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
    plain = value.plain
    return zeros(value.aval, ()) if plain is None and has_plain else plain, opened


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
