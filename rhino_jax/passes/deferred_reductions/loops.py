"""Unreduced values, and scans with unreduced carries, which are reduced once after the
loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import eqn_context, open_jaxpr
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.ir.program import RegionCall
from rhino_jax.rewrite.emit import scan_like


class UnreducedValue:
    """A value of the program, some of whose sums may be unreduced.

    Attributes:
      aval: abstract value of JAX: shape and dtype.
      plain: array of its reduced part; None: zero.
      open: index of a group → array of shape (*pieces, *shape).
      is_zero: whether it is known to be zero everywhere.
    """

    def __init__(
        self,
        aval: Any,
        plain: Any | None,
        opened: Mapping[int, Any] | None = None,
        *,
        maker: Any = None,
        is_zero: bool = False,
    ) -> None:
        """Create a value; `maker` is the equation whose source line its sums get."""
        self.aval, self.plain, self.open = aval, plain, dict(opened or {})
        self.is_zero, self._maker = is_zero, maker
        self._closed = None if self.open else plain

    def closed(self) -> Any:
        """Return the reduced array, computed once."""
        if self._closed is None:
            if self._maker is None:
                self._closed = self._sum()
            else:
                with eqn_context(self._maker):
                    self._closed = self._sum()
        return self._closed

    def _sum(self) -> Any:
        total = self.plain
        for array in self.open.values():
            count = array.ndim - len(self.aval.shape)
            whole = lax.reduce_sum(array, tuple(range(count)))
            total = whole if total is None else lax.add(total, whole)
        return zeros(self.aval, ()) if total is None else total


def zeros(aval: Any, pieces: Sequence[int]) -> Any:
    """Return a part of a value that is zero, with leading dims of sizes `pieces`."""
    return lax.full((*pieces, *aval.shape), 0, aval.dtype)


Parts = tuple[Any, dict[int, Any]]
"""(reduced part of a value or None, unreduced part by index of its group)."""


def run(
    eqn: Any,
    call: RegionCall,
    operands: Sequence[UnreducedValue],
    inside: Callable[[list[UnreducedValue]], list[UnreducedValue]],
    groups_of: Callable[[int], list[int]],
    pieces: Sequence[Sequence[int]],
) -> list[UnreducedValue]:
    """Run a scan, some of whose carries and stacked results are unreduced.

    Args:
      eqn: equation of the scan.
      call: how it runs its body.
      operands: its operands.
      inside: values of the body's inputs → values of its outputs.
      groups_of: value id → indices of the groups in which it stays unreduced.
      pieces: for every group sizes of the leading dims of its unreduced values.
    """
    ((body,), (region,)) = closed_region_jaxprs(eqn), call.regions
    consts = [_same(v) for v in call.consts(operands)]
    stacks = [v.closed() for v in call.sliced(operands)]
    wanted = [*map(groups_of, call.carries(region.inputs))]
    kept = [*map(groups_of, call.stacked(region.outputs))]
    avals = [v.aval for v in open_jaxpr(body).invars]

    def step(carries: list[Parts], slices: Sequence[Any]) -> tuple[Any, Any]:
        entering = [
            UnreducedValue(aval, *carry)
            for aval, carry in zip(call.carries(avals), carries, strict=True)
        ]
        sliced = [
            UnreducedValue(aval, x)
            for aval, x in zip(call.sliced(avals), slices, strict=True)
        ]
        outs = inside([*consts, *entering, *sliced])
        leaving = []
        for v, groups, entered in zip(outs, wanted, carries, strict=False):
            plain, opened = _parts(v, groups, pieces)
            if plain is None and entered[0] is not None:
                plain = zeros(v.aval, ())
            leaving.append((plain, opened))
        made = [
            _made(v, groups) for v, groups in zip(call.stacked(outs), kept, strict=True)
        ]
        return leaving, made

    init = _init(call.carries(operands), wanted, pieces)
    init = _filled(step, init, stacks, call.carries(avals))
    ends, made = scan_like(eqn, step, init, stacks)
    results = [
        UnreducedValue(var.aval, *parts, maker=eqn)
        for var, parts in zip(eqn.outvars, ends, strict=False)
    ]
    for var, (plain, opened) in zip(call.stacked(eqn.outvars), made, strict=True):
        fronts = {g: _in_front(x, len(pieces[g])) for g, x in opened.items()}
        results.append(UnreducedValue(var.aval, plain, fronts, maker=eqn))
    return results


def _same(value: UnreducedValue) -> UnreducedValue:
    """Return a value in reduced form: outside of the loop, if all iterations read
    it."""
    return UnreducedValue(value.aval, value.closed(), is_zero=value.is_zero)


def _init(
    values: Sequence[UnreducedValue],
    wanted: Sequence[Sequence[int]],
    pieces: Sequence[Sequence[int]],
) -> list[Parts]:
    """Return the initial carries of a scan.

    Args:
      values: the initial carries as operands.
      wanted: indices of the groups in which each carry stays unreduced.
      pieces: as of `run`.
    """
    found: list[Parts] = []
    for value, groups in zip(values, wanted, strict=True):
        plain, opened = _parts(value, groups, pieces)
        found.append((None if opened and value.is_zero else plain, opened))
    return found


def _parts(
    value: UnreducedValue, groups: Sequence[int], pieces: Sequence[Sequence[int]]
) -> Parts:
    """Return a carry in parts.

    Args:
      value: the carry.
      groups: indices of the groups in which it stays unreduced.
      pieces: as of `run`.
    """
    if not groups:
        return value.closed(), {}
    if not set(value.open) <= set(groups):
        value = _same(value)
    opened = {
        g: value.open[g] if g in value.open else zeros(value.aval, pieces[g])
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
