"""Ops that commute with reductions over micro-batches.

A group names operands in which an op is jointly linear, the others being given: `add`
has (0, 1), `mul` has (0,) and (1,). These ops commute with sums; ops that only move
elements also commute with maxima and other reductions.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from rhino_jax.ir.op import item_bytes
from rhino_jax.rewrite.flat import FlatOp


Group = tuple[int, ...]
"""Positions of the operands in which an op is jointly linear."""

FIRST: tuple[Group, ...] = ((0,),)
"""The groups of an op that is linear in its first operand."""

MOVING = frozenset({
    "broadcast_in_dim", "copy", "copy_p", "device_put", "dynamic_slice", "expand_dims",
    "gather", "layout_constraint", "name", "reshape", "rev", "rhino_pin",
    "rhino_rotate", "sharding_constraint", "slice", "split", "squeeze", "stop_gradient",
    "transpose", "unstack",
})  # fmt: skip
"""Ops that only move elements of their first operand."""

JOINING = frozenset({"concatenate", "device_put", "optimization_barrier", "stack"})
"""Ops that only move elements of all their operands."""

LINEAR: dict[str, tuple[Group, ...]] = {
    **dict.fromkeys(
        ("neg", "reduce_sum", "cumsum", "real", "imag", "conj", "reduce_window_sum",
         "select_and_gather_add", "select_and_scatter_add"),
        FIRST,
    ),
    **dict.fromkeys(("add", "add_any", "sub", "complex"), ((0, 1),)),
    **dict.fromkeys(
        ("mul", "dot_general", "conv_general_dilated", "ragged_dot_general"),
        ((0,), (1,)),
    ),
    "div": FIRST,
    "dynamic_update_slice": ((0, 1),),
    "pad": ((0, 1),),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add"), ((0, 2),)),
    "triangular_solve": ((1,),),
}  # fmt: skip
"""Op → its groups."""

EXTREMES = {"max": ("max", "reduce_max"), "min": ("min", "reduce_min")}
"""Reducer → ops that commute with it, jointly in all their operands."""


def groups_of(item: FlatOp, reducer: str) -> tuple[Group, ...]:
    """Return the groups of operands in which an op commutes with a reduction.

    Args:
      item: the op.
      reducer: the reduction over micro-batches, as in `states.Partial`.
    """
    name, operands = item.op.name, range(len(item.operands))
    if name in MOVING:
        return FIRST
    if name in JOINING:
        return (tuple(operands),)
    if name == "select_n":
        return (tuple(operands[1:]),)
    if name == "convert_element_type":
        return FIRST if _is_exact(item, reducer) else ()
    if reducer == "sum":
        if name == "div" and not _is_float(item):
            return ()
        return LINEAR.get(name, ())
    if name in EXTREMES.get(reducer, ()):
        return (tuple(operands),)
    return ()


def _types(item: FlatOp) -> tuple[str, str]:
    before, after = item.eqn.invars[0].aval.dtype, item.eqn.outvars[0].aval.dtype
    return str(before), str(after)


def _is_float(item: FlatOp) -> bool:
    return "float" in _types(item)[0] or "complex" in _types(item)[0]


def _is_exact(item: FlatOp, reducer: str) -> bool:
    """Whether a conversion of partial results keeps all that the reduction needs."""
    before, after = _types(item)
    if "bool" in (before, after):
        return before == after
    if "float" in before and "float" in after:
        old, new = jnp.finfo(before), jnp.finfo(after)
        return new.nmant >= old.nmant and new.maxexp >= old.maxexp
    is_widening = item_bytes(after) >= item_bytes(before)
    return is_widening and not ("float" in before and "int" in after)


def is_kept_zero(item: FlatOp, zeros: Sequence[bool]) -> bool:
    """Whether all results of an op are zero.

    Args:
      item: the op.
      zeros: whether each of its operands is zero.
    """
    found = groups_of(item, "sum")
    return any(all(zeros[i] for i in group) for group in found)
