"""Ops that a sum may be moved past.

An op is linear in some of its operands together where, all others being the same in
every part, the op of sums is the sum of the ops: `a + b` in both, `a * b` in either,
a concatenation in all. Rounding aside, as in any other order of adding.
"""

from __future__ import annotations

from rhino_jax.ir.program import Op, Program, item_bytes


Ways = tuple[tuple[int, ...], ...]
"""Sets of operands, any one of which may be open."""

_FIRST = frozenset({
    "neg", "copy", "copy_p", "reduce_sum", "reshape", "transpose", "squeeze",
    "expand_dims", "slice", "dynamic_slice", "broadcast_in_dim", "rev", "cumsum", "div",
    "rhino_rotate",
})  # fmt: skip

_BOTH = frozenset({"add", "sub", "add_any"})

_EITHER = frozenset({"mul", "dot_general"})

_FEW = {"dynamic_update_slice": (0, 1), "pad": (0, 1), "scatter-add": (0, 2)}

SUMS = frozenset({"dot_general", "reduce_sum", "scatter-add", "conv_general_dilated"})
"""Ops whose sums can be left open."""


def linear_ways(program: Program, op: Op) -> Ways:
    """The sets of operands in which an op is linear; none where it is not."""
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
"""Ops of which an operand that is not open would have to be filled up with zeros."""


def _is_exact(before: str, after: str) -> bool:
    """Whether every number of one type is one of the other."""
    if before == after:
        return True
    is_float = before.startswith(("float", "bfloat"))
    return is_float and item_bytes(after) > item_bytes(before)
