"""Emit a program again with some of its equations replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import bind_eqn, jaxpr_consts, open_jaxpr
from rhino_jax.frontend.regions import (
    PLAIN_CALLS,
    REMATS,
    closed_region_jaxprs,
    evaluate,
    has_barrier,
)
from rhino_jax.frontend.registry import local_params
from rhino_jax.rewrite.retraced import retraced


Instead = Callable[[Any, list[Any]], "list[Any] | None"]
"""(equation, operands) → results of a replacement, or None to run the equation."""


def is_plain_call(eqn: Any) -> bool:
    """Whether an equation is a call that means no more than its body."""
    return eqn.primitive.name in PLAIN_CALLS


def substitute(closed: Any, instead: Instead) -> Any:
    """Retrace a program with its calls inlined and some equations replaced.

    Args:
      closed: a closed jaxpr.
      instead: replacement of an equation; see `Instead`.
    Returns:
      A closed jaxpr of the same arguments, constants and results.
    """
    opened = open_jaxpr(closed)
    count = len(opened.invars)

    def run(*arrays: Any) -> list[Any]:
        return run_inlined(opened, arrays[count:], arrays[:count], instead)

    return retraced(closed, run)


def run_inlined(
    jaxpr: Any,
    consts: Sequence[Any],
    arrays: Sequence[Any],
    instead: Instead,
    opened: Callable[[Any], bool] = is_plain_call,
) -> list[Any]:
    """Evaluate a jaxpr, inlining calls and replacing some equations.

    Args:
      jaxpr: open jaxpr to evaluate.
      consts: arrays of its constants.
      arrays: arrays of its inputs.
      instead: replacement of an equation; see `Instead`.
      opened: whether the call of an equation is inlined.
    Returns:
      Arrays of the jaxpr's outputs.
    """

    def run(eqn: Any, operands: list[Any]) -> list[Any]:
        found = instead(eqn, operands)
        if found is None and opened(eqn):
            (body,) = closed_region_jaxprs(eqn)
            if eqn.primitive.name in REMATS and has_barrier(eqn.params):
                # One barrier each: a loop that is split needs only some of them.
                operands = [*map(lax.optimization_barrier, operands)]
            return evaluate(open_jaxpr(body), jaxpr_consts(body), operands, run)
        return bind_eqn(eqn, operands, eqn.params) if found is None else found

    return evaluate(jaxpr, consts, arrays, run)


def bind_part(
    eqn: Any, args: Sequence[Any], dims: Sequence[int], size: int
) -> list[Any]:
    """Bind an equation to operands that are parts of its own along a dim.

    Args:
      eqn: the equation.
      args: the operands.
      dims: for every result the dim of which it is a part; -1: it is whole.
      size: size of the parts.
    """
    whole = [tuple(v.aval.shape) for v in eqn.outvars]
    shapes = [
        shape if d == -1 else (*shape[:d], size, *shape[d + 1 :])
        for shape, d in zip(whole, dims, strict=True)
    ]
    return bind_local(eqn, args, shapes)


def bind_local(
    eqn: Any, args: Sequence[Any], shapes: Sequence[tuple[int, ...]]
) -> list[Any]:
    """Bind an equation to parts of its own operands.

    Args:
      eqn: the equation.
      args: the operands.
      shapes: of the parts of its results that they give.
    """
    ins = [tuple(jnp.shape(x)) for x in args]
    whole = [tuple(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
    params = eqn.params
    if [*ins, *shapes] != whole:
        params = local_params(eqn.primitive.name, params, ins, shapes)
    return bind_eqn(eqn, args, params)


def scan_like(
    eqn: Any,
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    length: int | None = None,
) -> tuple[Any, Any]:
    """Run a scan with the direction and unrolling of another.

    Args:
      eqn: equation of the other scan.
      step: (carry, slices) → (carry, results to stack).
      carry: initial carry.
      xs: arrays that are sliced along their first dim.
      length: number of steps; None: that of the other scan.
    Returns:
      The carry at the end, and the stacked results.
    """
    params = eqn.params
    more = {k: params[k] for k in ("unroll", "_split_transpose") if k in params}
    count = int(params["length"] if length is None else length)
    is_reverse = bool(params["reverse"])
    return lax.scan(step, carry, xs, length=count, reverse=is_reverse, **more)
