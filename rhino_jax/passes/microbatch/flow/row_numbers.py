"""Gathers and scatters by row number: `logits[jnp.arange(B), labels]`.

An index that equals the number of its own row stays inside of a micro-batch, where it
is the number of the row in the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rhino_jax.ir.axes import AxisSpan, locate, place
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.traits import FROM_ALL, OpKind
from rhino_jax.passes.microbatch.flow.states import RowsState, State, WholeState
from rhino_jax.rewrite.flat import FlatOp, FlatProgram


@dataclass(frozen=True, slots=True)
class ByRows:
    """A gather or scatter one of whose indices is the row number.

    Attributes:
      column: position in the index vector (the last dim of the indices) of the row
        number.
      dim: dim of the indices along which the row number counts.
      operands: dim of each operand that holds the batch.
      result: dim of the result that holds the batch.
    """

    column: int
    dim: int
    operands: tuple[int, ...]
    result: int


def by_rows(flat: FlatProgram, item: FlatOp, states: Sequence[State]) -> ByRows | None:
    """Return how a gather or scatter indexes by row number.

    Args:
      flat: the program.
      item: the op.
      states: states of its operands.
    Returns:
      None where the op is no gather or scatter, or does not index by row number.
    """
    kind = item.op.traits.kind
    if kind not in (OpKind.LOOKUP, OpKind.SCATTER) or len(states) < 2:
        return None
    if not all(isinstance(s, WholeState | RowsState) for s in states):
        return None
    dims = item.eqn.params.get("dimension_numbers")
    if dims is None:
        return None
    shape = item.eqn.invars[0].aval.shape
    indices = item.eqn.invars[1].aval.shape
    is_gather = kind is OpKind.LOOKUP
    to = dims.start_index_map if is_gather else dims.scatter_dims_to_operand_dims
    gone = dims.collapsed_slice_dims if is_gather else dims.inserted_window_dims
    windows = dims.offset_dims if is_gather else dims.update_window_dims
    moved = item.eqn.outvars[0] if is_gather else item.eqn.invars[2]
    batch = [d for d in range(len(moved.aval.shape)) if d not in windows]
    for column, d in enumerate(to):
        dim = counts_along(flat, item.operands[1], column)
        if dim is None or d not in gone or shape[d] != indices[dim]:
            continue
        operands = (d, dim) if is_gather else (d, dim, batch[dim])
        found = ByRows(column, dim, operands, batch[dim] if is_gather else d)
        if _fits(found, states):
            return found
    return None


def _fits(found: ByRows, states: Sequence[State]) -> bool:
    """Whether all sliced operands hold the batch in the expected dim, at one place."""
    cuts = {
        (s.span.dim == d, s.span.outer, s.span.inner)
        for s, d in zip(states, found.operands, strict=True)
        if isinstance(s, RowsState)
    }
    return len(cuts) == 1 and cuts.pop()[0]


def counts_along(
    flat: FlatProgram, value: int, column: int | None = None
) -> int | None:
    """Return the dim along which a value is 0, 1, 2, …, at any index of other dims.

    Args:
      flat: the program.
      value: id of the value.
      column: index in its last dim, if only elements with that index must count so;
        None: all elements.
    Returns:
      None where there is no such dim.
    """
    item = flat.maker.get(value)
    if item is None or item.regions:
        return None
    traits, rule, params = item.op.traits, item.op.rule, item.eqn.params
    if traits.kind is OpKind.GENERATOR and "dimension" in params:
        return int(params["dimension"])
    is_joined = traits.moves == FROM_ALL and traits.kind is OpKind.MOVEMENT
    if is_joined and traits.dims_param and column is not None:
        if params[traits.dims_param] != len(item.eqn.outvars[0].aval.shape) - 1:
            return None
        for operand, atom in zip(item.operands, item.eqn.invars, strict=True):
            if column < atom.aval.shape[-1]:
                return counts_along(flat, operand, column)
            column -= atom.aval.shape[-1]
        return None
    if traits.is_choice:
        return _wrapped(flat, item)
    if len(item.operands) != 1 or not traits.keeps_data or rule is None:
        return None
    dim = counts_along(flat, item.operands[0])
    if dim is None:
        return None
    span = AxisSpan(dim, item.eqn.invars[0].aval.shape[dim])
    at = locate(rule, rule.operands[0], span)
    if at is None or rule.factors[at.factor].kind is not FactorKind.PARALLEL:
        return None
    made = place(rule, rule.results[0], at)
    return made.dim if made is not None and made.is_plain else None


def _wrapped(flat: FlatProgram, item: FlatOp) -> int | None:
    """Return the counting dim of `select_n(x < 0, x, x + n)` with non-negative x."""
    test, same = flat.maker.get(item.operands[0]), item.operands[1]
    if test is None or test.op.traits.compares != "<" or len(item.operands) != 3:
        return None
    bound = test.operands[1]
    zero = flat.consts.get(bound)
    if zero is None or getattr(zero, "shape", ()) != () or zero != 0:
        return None
    dim = counts_along(flat, same)
    return dim if dim == counts_along(flat, test.operands[0]) else None
