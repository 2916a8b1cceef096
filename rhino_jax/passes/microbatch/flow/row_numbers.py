"""Gathers and scatters by row number: `logits[jnp.arange(B), labels]`.

An index that equals the number of its own row stays inside of a micro-batch, where it
is the number of the row in the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rhino_jax.frontend.rules.scatter import REDUCERS
from rhino_jax.passes.microbatch.flow.states import RowsState, State, WholeState
from rhino_jax.rewrite.flat import FlatOp, FlatProgram


SCATTERS = frozenset({"scatter", "scatter-sub", "scatter_sub", *REDUCERS})
"""Names of the scatter ops."""


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
    if item.op.name != "gather" and item.op.name not in SCATTERS:
        return None
    if not all(isinstance(s, WholeState | RowsState) for s in states):
        return None
    dims = item.eqn.params["dimension_numbers"]
    shape = item.eqn.invars[0].aval.shape
    indices = item.eqn.invars[1].aval.shape
    is_gather = item.op.name == "gather"
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
    cuts = [
        (s.dim == d, s.outer, s.inner)
        for s, d in zip(states, found.operands, strict=True)
        if isinstance(s, RowsState)
    ]
    return len(set(cuts)) == 1 and cuts[0][0]


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
    name, params = item.op.name, item.eqn.params
    shapes = [v.aval.shape for v in item.eqn.invars]
    shape = item.eqn.outvars[0].aval.shape
    if name == "iota":
        return int(params["dimension"])
    if name == "concatenate" and column is not None:
        if params["dimension"] != len(shape) - 1:
            return None
        for operand, part in zip(item.operands, shapes, strict=True):
            if column < part[-1]:
                return counts_along(flat, operand, column)
            column -= part[-1]
        return None
    if name == "select_n":
        return _wrapped(flat, item)
    if name not in ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze"):
        return None
    dim = counts_along(flat, item.operands[0])
    if dim is None or name == "convert_element_type":
        return dim
    if name == "broadcast_in_dim":
        made = int(params["broadcast_dimensions"][dim])
        return made if shape[made] == shapes[0][dim] else None
    return _same_dim(shapes[0], shape, dim)


def _same_dim(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    """Return the position of a dim after dims of size one were added or removed."""
    kept = [[d for d, n in enumerate(s) if n != 1] for s in (before, after)]
    if [before[d] for d in kept[0]] != [after[d] for d in kept[1]] or dim not in kept[
        0
    ]:
        return None
    return kept[1][kept[0].index(dim)]


def _wrapped(flat: FlatProgram, item: FlatOp) -> int | None:
    """Return the counting dim of `select_n(x < 0, x, x + n)` with non-negative x."""
    test, same = flat.maker.get(item.operands[0]), item.operands[1]
    if test is None or test.op.name != "lt" or len(item.operands) != 3:
        return None
    bound = test.operands[1]
    zero = flat.consts.get(bound)
    if zero is None or getattr(zero, "shape", ()) != () or zero != 0:
        return None
    dim = counts_along(flat, same)
    return dim if dim == counts_along(flat, test.operands[0]) else None
