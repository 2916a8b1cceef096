"""Row numbers as indices: `x[jnp.arange(n)[:, None], i]` picks from each row its own
elements.

To XLA and to the rules of gathers and scatters, any index may point to any row. With a
batching dim in place of the row numbers, as `vmap` has it, each row is indexed on its
own, so that rows are sharded or divided into micro-batches without communication.
Elements are the same: row numbers are never out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from rhino_jax._compat import bind_eqn, is_literal


class RowNumbers:
    """The integer arrays of a jaxpr whose elements are their own positions along a
    dim."""

    def __init__(self) -> None:
        self._along: dict[Any, int] = {}
        self._never = set[Any]()
        self._joined: dict[Any, Any] = {}

    def see_const(self, var: Any, const: Any) -> None:
        """Record a captured NumPy array, as `np.arange(n)[:, None]`."""
        if not isinstance(const, np.ndarray) or not const.size:
            return
        if const.dtype == bool and not const.any():
            self._never.add(var)
        if not np.issubdtype(const.dtype, np.integer):
            return
        for d, size in enumerate(const.shape):
            if size > 1 and (const == _apart(np.arange(size), d, const.ndim)).all():
                self._along[var] = d

    def see(self, eqn: Any) -> None:
        """Record an equation's result, where it holds row numbers or joins indices."""
        name, params = eqn.primitive.name, eqn.params
        if name == "iota":
            self._along[eqn.outvars[0]] = params["dimension"]
        if not eqn.invars or is_literal(eqn.invars[0]):
            return
        first, *others = eqn.invars
        if name == "concatenate":
            if params["dimension"] == first.aval.ndim - 1:
                self._joined[eqn.outvars[0]] = eqn
        elif name == "select_n":  # Of negative indices, which count from the end.
            if first in self._never and not is_literal(others[0]):
                self._carry(others[0], eqn, lambda d: d)
        elif first not in self._along:
            return
        elif name == "lt":
            if is_literal(others[0]) and np.all(np.asarray(others[0].val) <= 0):
                self._never.add(eqn.outvars[0])
        elif name == "convert_element_type":
            made, size = eqn.outvars[0].aval, max(first.aval.shape)
            if np.issubdtype(made.dtype, np.integer):
                if size - 1 <= np.iinfo(made.dtype).max:
                    self._carry(first, eqn, lambda d: d)
        elif name == "broadcast_in_dim":
            self._carry(first, eqn, lambda d: params["broadcast_dimensions"][d])
        elif name in ("reshape", "squeeze", "expand_dims"):
            self._carry(first, eqn, lambda d: _moved(eqn, d))

    def _carry(self, var: Any, eqn: Any, to: Callable[[int], int | None]) -> None:
        """Record that a result holds the row numbers of an operand, along a dim of the
        same size."""
        d, made = self._along.get(var), eqn.outvars[0]
        at = None if d is None else to(d)
        if at is not None and made.aval.shape[at] == var.aval.shape[d]:
            self._along[made] = at

    def of(self, eqn: Any) -> tuple[Callable[..., Any], list[Any]] | None:
        """Return a gather or scatter with batching dims in place of row numbers, as a
        function and its operands; None where an equation has none."""
        fields = _FIELDS.get(eqn.primitive.name.replace("-", "_").split("_")[0])
        if fields is None or is_literal(eqn.invars[1]):
            return None
        joined = self._joined.get(eqn.invars[1])
        if joined is None or any(v.aval.shape[-1] != 1 for v in joined.invars):
            return None
        map_, dropped, batched, rows = fields
        numbers = eqn.params["dimension_numbers"]
        shape, pieces = eqn.invars[0].aval.shape, list(joined.invars)
        pairs = dict(
            zip(getattr(numbers, batched), getattr(numbers, rows), strict=True)
        )
        left: list[tuple[int, Any]] = []
        for dim, piece in zip(getattr(numbers, map_), pieces, strict=True):
            along = None if is_literal(piece) else self._along.get(piece)
            if (
                along is not None
                and along < piece.aval.ndim - 1
                and along not in pairs.values()
                and piece.aval.shape[along] == shape[dim]
                and dim in getattr(numbers, dropped)
            ):
                pairs[dim] = along
            else:
                left.append((dim, piece))
        if not left or len(left) == len(pieces):
            return None
        dims = sorted(pairs)
        params = eqn.params | {
            "indices_are_sorted": False,
            "dimension_numbers": numbers._replace(
                **{
                    map_: tuple(dim for dim, _ in left),
                    dropped: tuple(
                        d for d in getattr(numbers, dropped) if d not in pairs
                    ),
                    batched: tuple(dims),
                    rows: tuple(pairs[d] for d in dims),
                }
            ),
        }

        def run(x: Any, *operands: Any) -> Any:
            some, updates = operands[: len(left)], operands[len(left) :]
            indices = lax.concatenate(some, some[0].ndim - 1) if some[1:] else some[0]
            return bind_eqn(eqn, [x, indices, *updates], params)

        return run, [eqn.invars[0], *(piece for _, piece in left), *eqn.invars[2:]]


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


def _apart(numbers: np.ndarray, dim: int, rank: int) -> np.ndarray:
    """Return a vector as an array with all other dims of size one."""
    return numbers.reshape([-1 if d == dim else 1 for d in range(rank)])


def _moved(eqn: Any, dim: int) -> int | None:
    """Return the dim to which a reshape moves a dim, where it adds or removes dims of
    size one alone; None elsewhere."""
    before, after = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))
    old, new = ([d for d, n in enumerate(shape) if n != 1] for shape in (before, after))
    if dim not in old or [before[d] for d in old] != [after[d] for d in new]:
        return None
    return new[old.index(dim)]
