"""Sorts, look-ups, products and counts of rows in blocks, as JAX ops.

N rows of a batch are S blocks of N / S consecutive rows. In the order of a block,
positions still count from the first row of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import bind_eqn
from rhino_jax.ir.axes import AxisSpan
from rhino_jax.rewrite.emit import bind_local


@dataclass(frozen=True, slots=True)
class Blocks:
    """Division of rows.

    Attributes:
      count: number of blocks of rows.
    """

    count: int

    def sort(self, eqn: Any, arrays: Sequence[Any]) -> list[Any]:
        """Sort the rows of each block.

        Args:
          eqn: the sort.
          arrays: its operands, [rows] each.
        """
        split = [jnp.reshape(x, (self.count, -1)) for x in arrays]
        made = bind_eqn(eqn, split, {**eqn.params, "dimension": 1})
        return [jnp.reshape(x, -1) for x in made]

    def sizes(self, keys: Any, experts: int, dtype: Any) -> Any:
        """Count the rows of each expert in each block.

        Args:
          keys: expert of each row.
          experts: number of experts.
          dtype: of the result.
        Returns:
          Array [blocks, experts].
        """
        keys = jnp.reshape(keys, (self.count, -1, 1))
        each = lax.broadcasted_iota(keys.dtype, (1, 1, experts), 2)
        return jnp.sum(keys == each, axis=1, dtype=dtype)

    def lookup(
        self,
        eqn: Any,
        arrays: Sequence[Any],
        spans: Sequence[AxisSpan],
        made: AxisSpan,
        shape: tuple[int, ...],
    ) -> Any:
        """Look up, or write, the rows of each block.

        Args:
          eqn: the look-up, or the scatter.
          arrays: its operands: rows, positions in them, and what is written.
          spans: the dim of each that has the rows.
          made: the dim of the result that has them.
          shape: shape of a block of the result.
        """
        size = arrays[0].shape[spans[0].dim] // self.count

        def one(block: Any, x: Any, index: Any, *more: Any) -> Any:
            index = index - (block * size).astype(index.dtype)
            return bind_local(eqn, (x, index, *more), [shape])[0]

        split = [
            _split(x, s.dim, self.count) for x, s in zip(arrays, spans, strict=True)
        ]
        run = jax.vmap(one, (0, *(s.dim for s in spans)), made.dim)
        found = run(lax.iota(jnp.int32, self.count), *split)
        d = made.dim
        return jnp.reshape(found, (*found.shape[:d], -1, *found.shape[d + 2 :]))

    def multiply(
        self,
        eqn: Any,
        arrays: Sequence[Any],
        sizes: Any,
        dims: Sequence[int | None],
        shape: Sequence[int],
    ) -> Any:
        """Multiply the rows of each block by group, or sum products of rows by group.

        Args:
          eqn: the `ragged_dot_general`.
          arrays: its first two operands: rows, and matrices or other rows; of several
            parts of the experts, with a leading dim of the parts.
          sizes: as of the method `sizes`; of several parts, [parts, blocks, experts].
          dims: the dims of the rows in both operands, of a part; None: the second has
            none.
          shape: shape of the result.
        """
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        contract, batch = numbers.dot_dimension_numbers
        added = sizes.ndim - 2
        split = [
            x if d is None else _split(x, d + added, self.count)
            for x, d in zip(arrays, dims, strict=True)
        ]

        def moved(of: Sequence[int], at: int | None) -> tuple[int, ...]:
            return tuple(d + added + (at is not None and d >= at) for d in of)

        contracted = [moved(c, at) for c, at in zip(contract, dims, strict=True)]
        if dims[1] is not None:
            contracted = [
                (at + added, *c)
                for c, at in zip(contracted, dims, strict=True)
                if at is not None
            ]
        parts = (0,) * added
        batches = [(*parts, *moved(b, at)) for b, at in zip(batch, dims, strict=True)]
        new = lax.RaggedDotDimensionNumbers(
            (tuple(contracted), tuple(batches)),
            moved(numbers.lhs_ragged_dimensions, dims[0]),
            moved(numbers.rhs_group_dimensions, dims[1]),
        )
        params = {**eqn.params, "ragged_dot_dimension_numbers": new}
        (found,) = bind_eqn(eqn, [*split, sizes], params)
        if dims[1] is not None:
            found = jnp.moveaxis(found, added, 0)
        return jnp.reshape(found, shape)


def _split(x: Any, dim: int, count: int) -> Any:
    """Reshape an array so that a dim is two: the blocks, and the rows of each."""
    return jnp.reshape(x, (*x.shape[:dim], count, -1, *x.shape[dim + 1 :]))
