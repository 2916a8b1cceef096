"""Row numbers as indices: `x[jnp.arange(n)[:, None], i]` picks from each row its own
elements.

To XLA and to the rules of gathers and scatters, any index may point to any row. With a
batching dim in place of the row numbers, as `vmap` has it, each row is indexed on its
own, so that rows are sharded or divided into micro-batches without communication.
Elements are the same: row numbers are never out of bounds.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from rhino_jax._compat import bind_eqn
from rhino_jax.frontend.tracing.integers import Integers
from rhino_jax.frontend.tracing.windows import Move


_FIELDS = {
    "gather": (
        "start_index_map",
        "collapsed_slice_dims",
        "operand_batching_dims",
        "start_indices_batching_dims",
    ),
    "scatter": (
        "scatter_dims_to_operand_dims",
        "inserted_window_dims",
        "operand_batching_dims",
        "scatter_indices_batching_dims",
    ),
}
"""Kind of op → fields of its dimension numbers: operand dims that are indexed, those
without a window, batching dims of the operand and of the indices."""


def by_rows(eqn: Any, integers: Integers) -> Move | None:
    """Return a gather or scatter with batching dims in place of row numbers; None where
    an equation has none.

    Args:
      eqn: the equation.
      integers: what its operands hold.
    """
    fields = _FIELDS.get(eqn.primitive.name.replace("-", "_").split("_")[0])
    if fields is None:
        return None
    indexed, dropped, batched, paired = fields
    numbers = eqn.params["dimension_numbers"]
    old = {name: getattr(numbers, name) for name in fields}
    pairs = dict(zip(old[batched], old[paired], strict=True))
    shape, counts = (v.aval.shape for v in eqn.invars[:2])
    left: list[int] = []
    columns = integers.columns(eqn.invars[1]) or (None,) * len(old[indexed])
    for column, (dim, line) in enumerate(zip(old[indexed], columns, strict=True)):
        along = None if line is None else line.along
        if (
            along is not None
            and along not in pairs.values()
            and counts[along] == shape[dim]
            and dim in old[dropped]
        ):
            pairs[dim] = along
        else:
            left.append(column)
    if not left or len(left) == len(old[indexed]):
        return None
    dims = sorted(pairs)
    new = {
        indexed: tuple(old[indexed][c] for c in left),
        dropped: tuple(d for d in old[dropped] if d not in pairs),
        batched: tuple(dims),
        paired: tuple(pairs[d] for d in dims),
    }
    params = eqn.params | {
        "indices_are_sorted": False,
        "dimension_numbers": numbers._replace(**new),
    }
    pieces = integers.pieces.get(eqn.invars[1])
    some = [eqn.invars[1]] if pieces is None else [pieces[c] for c in left]

    def run(x: Any, *operands: Any) -> Any:
        arrays, updates = list(operands[: len(some)]), operands[len(some) :]
        if pieces is None:
            (whole,) = arrays
            last = whole.ndim - 1
            arrays = [lax.slice_in_dim(whole, c, c + 1, axis=last) for c in left]
        indices = lax.concatenate(arrays, arrays[0].ndim - 1)
        return bind_eqn(eqn, [x, indices, *updates], params)

    return run, [eqn.invars[0], *some, *eqn.invars[2:]]
