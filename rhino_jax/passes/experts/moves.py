"""Sorts, look-ups, products and counts of rows in blocks, as JAX ops.

N rows of a batch are S blocks of N / S consecutive rows. In the order of a block,
positions still count from the first row of the batch. Where experts are divided into P
parts, each part has rows in an order of its own, in which those of its experts come
first: arrays have a leading dim [P].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import bind_eqn
from rhino_jax.ir.axes import AxisSpan


@dataclass(frozen=True, slots=True)
class Blocks:
    """Division of rows, and of experts.

    Attributes:
      count: number of blocks of rows.
      parts: number of parts of the experts.
    """

    count: int
    parts: int = 1

    def sort(self, eqn: Any, arrays: Sequence[Any], experts: int) -> list[Any]:
        """Sort the rows of each block by expert, for each part of the experts.

        Args:
          eqn: the sort.
          arrays: its operands, [rows] each, the experts first.
          experts: number of experts.
        Returns:
          Its results, [rows] each, or [parts, rows]; and the number of rows in each
          block that are of the part's experts, [parts, blocks], of several parts.
        """
        split = [jnp.reshape(x, (self.count, -1)) for x in arrays]
        if self.parts == 1:
            made = bind_eqn(eqn, split, {**eqn.params, "dimension": 1})
            return [*(jnp.reshape(x, -1) for x in made), None]
        each = experts // self.parts
        keys = split[0]
        first = lax.iota(keys.dtype, self.parts)[:, None, None] * each
        is_own = (keys >= first) & (keys < first + each)
        key = jnp.where(is_own, keys - first, each)
        whole = [jnp.broadcast_to(x, key.shape) for x in (key, *split)]
        made = bind_eqn(eqn, whole, {**eqn.params, "dimension": 2})[1:]
        own = jnp.sum(is_own, axis=2, dtype=jnp.int32)
        return [*(jnp.reshape(x, (self.parts, -1)) for x in made), own]

    def sort_again(self, eqn: Any, arrays: Sequence[Any]) -> list[Any]:
        """Sort the rows of each block, of each part.

        Args:
          eqn: the sort.
          arrays: its operands, [rows] or [parts, rows].
        """
        lead = (self.count,) if self.parts == 1 else (self.parts, self.count)
        whole = max(arrays, key=lambda x: x.size).shape
        split = [jnp.reshape(jnp.broadcast_to(x, whole), (*lead, -1)) for x in arrays]
        made = bind_eqn(eqn, split, {**eqn.params, "dimension": len(lead)})
        return [jnp.reshape(x, whole) for x in made]

    def sizes(self, keys: Any, experts: int, dtype: Any) -> Any:
        """Count the rows of each expert in each block.

        Args:
          keys: expert of each row.
          experts: number of experts.
          dtype: of the result.
        Returns:
          Array [blocks, experts], or [parts, blocks, experts of a part].
        """
        keys = jnp.reshape(keys, (self.count, -1, 1))
        each = lax.broadcasted_iota(keys.dtype, (1, 1, experts), 2)
        found = jnp.sum(keys == each, axis=1, dtype=dtype)
        if self.parts == 1:
            return found
        return jnp.moveaxis(jnp.reshape(found, (self.count, self.parts, -1)), 1, 0)

    def lookup(
        self,
        fn: Callable[..., Any],
        arrays: Sequence[Any],
        spans: Sequence[AxisSpan],
        made: AxisSpan,
    ) -> Any:
        """Look up, or write, the rows of each block.

        Args:
          fn: function of a block of each operand.
          arrays: the operands, of one part: rows, positions in them, and what is
            written.
          spans: the dim of each that has the rows.
          made: the dim of the result that has them.
        """
        size = arrays[0].shape[spans[0].dim] // self.count

        def one(block: Any, x: Any, index: Any, *more: Any) -> Any:
            return fn(x, index - (block * size).astype(index.dtype), *more)

        split = [
            _split(x, s.dim, self.count) for x, s in zip(arrays, spans, strict=True)
        ]
        run = jax.vmap(one, (0, *(s.dim for s in spans)), made.dim)
        found = run(lax.iota(jnp.int32, self.count), *split)
        d = made.dim
        return jnp.reshape(found, (*found.shape[:d], -1, *found.shape[d + 2 :]))

    def multiply(
        self, eqn: Any, arrays: Sequence[Any], sizes: Any, dims: Sequence[int | None]
    ) -> Any:
        """Multiply the rows of each block by group, or sum products of rows by group.

        Args:
          eqn: the `ragged_dot_general`.
          arrays: its first two operands: rows, with a leading dim of several parts, and
            matrices or other rows.
          sizes: as of the method `sizes`.
          dims: the dims of the rows in both operands, of one part; None: the second has
            none.
        """
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        contract, batch = numbers.dot_dimension_numbers
        groups = numbers.rhs_group_dimensions
        added = int(self.parts > 1)
        split = list(arrays)
        if added and dims[1] is None:
            (at,) = groups
            split[1] = jnp.moveaxis(_split(split[1], at, self.parts), at, 0)
        split = [
            x if d is None else _split(x, d + added, self.count)
            for x, d in zip(split, dims, strict=True)
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
        batches = [moved(b, at) for b, at in zip(batch, dims, strict=True)]
        if added:
            batches = [(0, *b) for b in batches]
        new = lax.RaggedDotDimensionNumbers(
            (tuple(contracted), tuple(batches)),
            moved(numbers.lhs_ragged_dimensions, dims[0]),
            moved(groups, dims[1]),
        )
        params = {**eqn.params, "ragged_dot_dimension_numbers": new}
        (found,) = bind_eqn(eqn, [*split, sizes], params)
        shape = eqn.outvars[0].aval.shape
        if not added:
            return jnp.reshape(found, shape)
        if dims[1] is None:
            return jnp.reshape(found, (self.parts, *shape))
        return jnp.reshape(jnp.moveaxis(found, 1, 0), shape)

    def parted(self, x: Any, dim: int | None) -> Any:
        """Return an array with its dim of the parts first; None: it has none."""
        if dim is None:
            return jnp.broadcast_to(x, (self.parts, *x.shape))
        return jnp.moveaxis(x, dim, 0)

    def own(self, numbers: Any, rows: int) -> Any:
        """Return which sorted rows are of the part's experts: [parts, rows].

        Args:
          numbers: how many are in each block, [parts, blocks].
          rows: number of rows.
        """
        at = lax.broadcasted_iota(jnp.int32, (1, 1, rows // self.count), 2)
        return jnp.reshape(at < numbers[:, :, None], (self.parts, rows))

    def are_own(self, at: Any, numbers: Any) -> Any:
        """Return which positions, [parts, …], are of rows of the part's experts; see
        `own`."""
        at = jnp.reshape(at, (self.parts, self.count, -1))
        first = lax.iota(at.dtype, self.count) * at.shape[-1]
        is_own = at - first[:, None] < numbers[:, :, None]
        return jnp.reshape(is_own, (self.parts, -1))


def _split(x: Any, dim: int, count: int) -> Any:
    """Reshape an array so that a dim is two: the blocks, and the rows of each."""
    return jnp.reshape(x, (*x.shape[:dim], count, -1, *x.shape[dim + 1 :]))
