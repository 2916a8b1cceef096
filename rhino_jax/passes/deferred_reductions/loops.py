"""Loops whose carries are open sums, reduced once behind the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import jaxpr_consts, open_jaxpr, scan_counts
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.ir.program import Op
from rhino_jax.passes.deferred_reductions.values import (
    RegionRunner,
    UnreducedValue,
    zeros,
)


Parts = tuple[Any, dict[int, Any]]
"""What is whole of a value, or None, and its open parts by group."""


def run(
    runner: RegionRunner, op: Op, eqn: Any, operands: Sequence[UnreducedValue]
) -> list[UnreducedValue]:
    """A scan, some of whose carries and stacked results are open."""
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
    ends, made = lax.scan(
        step,
        init,
        stacks,
        length=int(eqn.params["length"]),
        reverse=bool(eqn.params["reverse"]),
        unroll=eqn.params["unroll"],
    )
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
    """A value that every run of a body reads: whole before the loop."""
    return UnreducedValue(value.aval, value.closed(), is_zero=value.is_zero)


def _init(
    runner: RegionRunner,
    values: Sequence[UnreducedValue],
    wanted: Sequence[Sequence[int]],
) -> list[Parts]:
    """Carries as they enter the loop."""
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
    """A carry as it leaves the body; with a whole part where it entered with one."""
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
    """A stacked result as it leaves the body."""
    if not value.open or not set(value.open) <= set(groups):
        return value.closed(), {}
    return value.plain, dict(value.open)


def _filled(
    step: Any, init: list[Parts], stacks: Sequence[Any], avals: Sequence[Any]
) -> list[Parts]:
    """The carries with a whole part wherever the body adds to it."""
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
    """(length, *pieces, …) → (*pieces, length, …)."""
    return jnp.moveaxis(array, 0, count)
