"""Linear ops, which commute with sums.

An op is jointly linear in some operands if, with all others fixed, the op of sums is
the sum of the ops: `a + b` in both, `a * b` in either, a concatenation in all. It holds
up to rounding, as for any other order of addition.
"""

from __future__ import annotations

from rhino_jax.ir.program import Op, Program, item_bytes


Ways = tuple[tuple[int, ...], ...]
"""Sets of positions of operands; all operands of one set may be unreduced."""

_FIRST = frozenset({
    "neg", "copy", "copy_p", "reduce_sum", "reshape", "transpose", "squeeze",
    "expand_dims", "slice", "dynamic_slice", "broadcast_in_dim", "rev", "cumsum", "div",
    "rhino_rotate",
})  # fmt: skip
"""Ops that are linear in their first operand."""

_BOTH = frozenset({"add", "sub", "add_any"})
"""Ops that are jointly linear in two operands."""

_EITHER = frozenset({"mul", "dot_general"})
"""Ops that are linear in each of two operands."""

_FEW = {"dynamic_update_slice": (0, 1), "pad": (0, 1), "scatter-add": (0, 2)}
"""Op → the operands in which it is jointly linear."""

SUMS = frozenset({"dot_general", "reduce_sum", "scatter-add", "conv_general_dilated"})
"""Ops whose own sums can be deferred."""


def linear_ways(program: Program, op: Op) -> Ways:
    """Return the sets of operands in which an op is jointly linear, if any."""
    name, values = op.name, program.values
    if op.call is not None or len(op.results) != 1:
        return ()
    kind = values[op.results[0]].dtype
    if not kind.startswith(("float", "bfloat", "complex")):
        return ()
    if name in _FIRST:
        return ((0,),)
    if name == "convert_element_type":
        return ((0,),) if _is_exact(values[op.operands[0]].dtype, kind) else ()
    if name in _BOTH:
        return ((0, 1),)
    if name in _EITHER:
        return ((0,), (1,))
    if name in _FEW:
        return (_FEW[name],)
    if name == "select_n":
        return (tuple(range(1, len(op.operands))),)
    if name == "concatenate":
        return (tuple(range(len(op.operands))),)
    return ()


NEEDS_ALL = frozenset({"concatenate"})
"""Ops whose reduced operands would have to be padded with zeros if others are
unreduced."""


def _is_exact(before: str, after: str) -> bool:
    """Whether one dtype represents every number of another.

    Args:
      before: the other dtype.
      after: the one dtype.
    """
    if before == after:
        return True
    is_float = before.startswith(("float", "bfloat"))
    return is_float and item_bytes(after) > item_bytes(before)
