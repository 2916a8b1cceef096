"""Run a program with other last bits, to measure how far its results may differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import (
    jaxpr_consts,
    open_jaxpr,
    with_weak_types,
)
from rhino_jax.frontend.importer import rule_of
from rhino_jax.frontend.regions import (
    bind_within,
    evaluate,
)
from rhino_jax.ir.traits import OpKind


def with_other_rounding(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a function whose sums and conversions round by one last bit more or less.

    So do its arguments, since what a sum of them rounds to depends on its order. Signs
    are random, those of the arguments by a seed, and equal numbers stay equal, since
    gradients of maxima look for them. Integers in floats are exact (masks, counts, the
    ones of a scale) and stay.

    Args:
      fn: function of arrays.
    Returns:
      Function of a seed and of the same arrays.
    """

    def run(seed: Any, *arrays: Any) -> list[Any]:
        closed = jax.make_jaxpr(fn)(*arrays)
        nudged = [_nudged(x, seed) for x in arrays]
        return evaluate(open_jaxpr(closed), jaxpr_consts(closed), nudged, _run)

    return run


def _run(eqn: Any, operands: list[Any]) -> list[Any]:
    outs = bind_within(eqn, operands, _run)
    return [*map(_nudged, outs)] if _rounds(eqn) else outs


def _rounds(eqn: Any) -> bool:
    """Whether an equation's results depend on the order of additions, or are rounded to
    a narrower type."""
    found, is_known = rule_of(eqn)
    if not is_known:
        return False
    if found.traits is not None and found.traits.kind is OpKind.CONVERSION:
        return eqn.outvars[0].aval.dtype.itemsize < eqn.invars[0].aval.dtype.itemsize
    return any(f.reducer == "sum" for f in found.rule.factors)


def _nudged(x: Any, seed: Any = 0) -> Any:
    """Return an array whose numbers are off by a last bit, the sign from their bits."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return x
    bits = lax.bitcast_convert_type(jnp.real(x).astype(jnp.float32), jnp.uint32)
    # A finalizer of hashes: xorshift and multiplication.
    at = (bits ^ jnp.uint32(seed)) * jnp.uint32(0x9E3779B9)
    at = (at ^ (at >> 15)) * jnp.uint32(0x85EBCA6B)
    sign = jnp.where((at ^ (at >> 13)) & 1, 1.0, -1.0)
    other = x * (1 + jnp.finfo(dtype).eps * sign).astype(dtype)
    found = jnp.where(x == jnp.round(x), x, other)
    return with_weak_types([found], [jax.typeof(x)])[0]
