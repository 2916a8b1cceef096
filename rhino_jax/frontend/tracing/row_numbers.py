"""Row numbers as indices: `x[jnp.arange(n)[:, None], i]` picks from each row its own
elements.

To XLA and to the rules of gathers and scatters, any index may point to any row. With a
batching dim in place of the row numbers, as `vmap` has it, each row is indexed on its
own, so that rows are sharded or divided into micro-batches without communication.
Elements are the same: row numbers are never out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax

from rhino_jax._compat import bind_eqn, is_literal, scan_counts
from rhino_jax.frontend.regions import entering, region_kind
from rhino_jax.ir.program import RegionKind


@dataclass(frozen=True, slots=True)
class Rows:
    """The row numbers in an array of integers.

    Attributes:
      along: dim along which every element is its own position; None: there is none.
      columns: component of the last dim, whose elements are their positions along a
        dim → that dim.
    """

    along: int | None = None
    columns: Mapping[int, int] = field(default_factory=dict)

    def moved(self, by: int) -> Rows | None:
        """Return the row numbers with all dims moved by a number of dims; None where
        none are left."""
        dims = [] if self.along is None else [self.along]
        if any(d + by < 0 for d in (*dims, *self.columns.values())):
            return None
        along = None if self.along is None else self.along + by
        return Rows(along, {c: d + by for c, d in self.columns.items()})


class RowNumbers:
    """The arrays of a jaxpr that hold row numbers, as far as its equations were seen.

    Attributes:
      entering: position of an input → its row numbers.
    """

    def __init__(self, entering: Mapping[int, Rows] | None = None) -> None:
        self.entering = entering or {}
        self._rows: dict[Any, Rows] = {}
        self._never = set[Any]()
        self._pieces: dict[Any, Sequence[Any]] = {}

    def enter(self, inputs: Sequence[Any]) -> None:
        """Record the row numbers of a jaxpr's inputs."""
        self._rows.update((inputs[i], rows) for i, rows in self.entering.items())

    def rows(self, atom: Any) -> Rows | None:
        """Return the row numbers in a variable or literal."""
        return None if is_literal(atom) else self._rows.get(atom)

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
                self._rows[var] = Rows(d)

    def see(self, eqn: Any) -> None:
        """Record an equation's result, where it holds row numbers."""
        name, params = eqn.primitive.name, eqn.params
        if name == "iota":
            self._rows[eqn.outvars[0]] = Rows(params["dimension"])
        if not eqn.invars or is_literal(eqn.invars[0]):
            return
        first, *others = eqn.invars
        if name == "concatenate":
            if params["dimension"] == first.aval.ndim - 1:
                self._join(eqn)
        elif name == "select_n":  # Of negative indices, which count from the end.
            if first in self._never:
                self._carry(others[0], eqn, lambda d: d)
        elif self.rows(first) is None:
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

    def _carry(self, atom: Any, eqn: Any, to: Callable[[int], int | None]) -> None:
        """Record that a result holds the row numbers of an operand, along a dim of the
        same size."""
        rows, made = self.rows(atom), eqn.outvars[0]
        if rows is None or rows.along is None:
            return
        at = to(rows.along)
        if at is not None and made.aval.shape[at] == atom.aval.shape[rows.along]:
            self._rows[made] = Rows(at)

    def _join(self, eqn: Any) -> None:
        """Record an array of indices whose components are concatenated."""
        if any(v.aval.shape[-1] != 1 for v in eqn.invars):
            return
        last = eqn.outvars[0].aval.ndim - 1
        columns = {
            c: rows.along
            for c, rows in enumerate(map(self.rows, eqn.invars))
            if rows is not None and rows.along is not None and rows.along < last
        }
        if columns:
            self._rows[eqn.outvars[0]] = Rows(None, columns)
            self._pieces[eqn.outvars[0]] = eqn.invars

    def inside(self, eqn: Any) -> list[RowNumbers]:
        """Return those of each sub-jaxpr of an equation, with their inputs."""
        rows = [self.rows(v) for v in eqn.invars]
        same = entering(eqn, rows)
        if region_kind(eqn) is RegionKind.SCAN:
            num_consts, num_carry = scan_counts(eqn.params)
            slices = [r and r.moved(-1) for r in rows[num_consts + num_carry :]]
            same = [[*same[0], *[None] * num_carry, *slices]]
        return [
            RowNumbers({i: r for i, r in enumerate(one) if r is not None})
            for one in same
        ]

    def leave(self, eqn: Any, inner: RowNumbers, results: Sequence[Any]) -> None:
        """Record the results of a call, or the stacks of a scan, given those of its
        sub-jaxpr and the results of that."""
        kind = region_kind(eqn)
        by = int(kind is RegionKind.SCAN)
        first = scan_counts(eqn.params)[1] if by else 0
        if kind not in (RegionKind.CALL, RegionKind.SCAN):
            return
        for made, atom in zip(eqn.outvars[first:], results[first:], strict=True):
            rows = inner.rows(atom)
            moved = None if rows is None else rows.moved(by)
            if moved is not None:
                self._rows[made] = moved

    def of(self, eqn: Any) -> tuple[Callable[..., Any], list[Any]] | None:
        """Return a gather or scatter with batching dims in place of row numbers, as a
        function and its operands; None where an equation has none."""
        fields = _FIELDS.get(eqn.primitive.name.replace("-", "_").split("_")[0])
        rows = None if fields is None else self.rows(eqn.invars[1])
        if fields is None or rows is None:
            return None
        indexed, dropped, batched, paired = fields
        numbers = eqn.params["dimension_numbers"]
        old = {name: getattr(numbers, name) for name in fields}
        pairs = dict(zip(old[batched], old[paired], strict=True))
        shape, counts = (v.aval.shape for v in eqn.invars[:2])
        left: list[int] = []
        for column, dim in enumerate(old[indexed]):
            along = rows.columns.get(column)
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
        pieces = self._pieces.get(eqn.invars[1])
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
