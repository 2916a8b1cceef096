"""Buffers in which blocks of tokens send rows to the parts of the experts, and back.

A block's rows, in the order of experts, are in runs: those of the first part's experts,
then those of the second's. In a round each block sends up to C rows to each part, from
[blocks, parts, C] to [parts, blocks, C]: sharded, an all-to-all. A part has M = blocks
x C rows then, and orders them by expert; slots that hold no row of its own are last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


CAPACITY = 1.25
"""Rows that a block sends to a part in a round, over those that it has on average for
one. Source: Fedus et al. 2022 (Switch Transformer), section 2.2, "capacity factor"."""

DEVIATIONS = 4
"""As many standard deviations of the number of rows of a part, where tokens take
experts at random, are below that, too."""


def num_slots(rows: int, parts: int) -> int:
    """Return the number of rows that a block sends to a part in a round.

    Args:
      rows: rows of a block.
      parts: number of parts.
    """
    mean = rows / parts
    return min(rows, int(max(CAPACITY * mean, mean + DEVIATIONS * mean**0.5)) + 1)


@dataclass(frozen=True, slots=True)
class Buffers:
    """The rows of one round.

    Attributes:
      at: position of each slot's row in its block's order, [parts, blocks, slots].
      first: position of the first row of a round, for each part, [parts, blocks].
      own: number of rows, [parts, blocks].
      sizes: rows by expert of a part, [parts, groups, experts].
      sources, targets: slot of each row of a part in the order of experts; and place in
        it of each slot; [parts, groups, blocks of a group x slots].
    """

    at: Any
    first: Any
    own: Any
    sizes: Any
    sources: Any
    targets: Any

    @classmethod
    def of(cls, sizes: Any, rows: int, slots: int, start: Any, groups: int) -> Buffers:
        """Return the buffers of a round.

        Args:
          sizes: rows by expert of each block, [parts, blocks, experts of a part].
          rows: rows of a block.
          slots: rows that a block sends to a part in a round.
          start: how many were sent in earlier rounds.
          groups: number of groups of blocks.
        """
        parts, blocks, _ = sizes.shape
        ends = jnp.clip(jnp.cumsum(sizes, axis=2) - start, 0, slots)
        sent = jnp.diff(ends, axis=2, prepend=0)
        own, totals = ends[:, :, -1], jnp.sum(sizes, axis=2)
        first = jnp.cumsum(totals, axis=0) - totals + start
        at = (first[:, :, None] + lax.iota(first.dtype, slots)) % rows
        runs = jnp.concatenate([sent, slots - own[:, :, None]], axis=2)
        runs = jnp.reshape(runs, (parts, groups, blocks // groups, -1))
        size = runs.shape[2] * slots
        slot, place = _starts(runs), _starts(jnp.swapaxes(runs, 2, 3))
        sources = _pieces(place, jnp.swapaxes(slot, 2, 3) - place, size)
        targets = _pieces(slot, jnp.swapaxes(place, 2, 3) - slot, size)
        by_expert = jnp.sum(runs[..., :-1], axis=2)
        return cls(at, first, own, by_expert, sources, targets)

    @property
    def size(self) -> int:
        """Return the number of rows of a part, with slots that hold none."""
        return self.at.shape[1] * self.at.shape[2]

    @property
    def is_own(self) -> Any:
        """Return which rows of a part are there, [parts, blocks x slots]."""
        total = jnp.sum(self.sizes, axis=2, keepdims=True)
        is_own = lax.iota(total.dtype, self.sources.shape[2]) < total
        return jnp.reshape(is_own, (len(is_own), -1))

    def positions(self, x: Any) -> Any:
        """Return the elements of rows that are sent, [blocks x parts x slots, …]; those
        of slots that hold none are of other rows.

        Args:
          x: [rows of all blocks, …].
        """
        split = jnp.reshape(x, (self.at.shape[1], -1, *x.shape[1:]))
        found = jax.vmap(_take)(split, jnp.swapaxes(self.at, 0, 1))
        return jnp.reshape(found, (-1, *x.shape[1:]))

    def owned(self, x: Any, limit: int) -> Any:
        """Return positions to write sent rows to, beyond `limit` where there is none.

        Args:
          x: [blocks x parts x slots, …].
        """
        own = jnp.swapaxes(self.own, 0, 1)[:, :, None]
        is_own = lax.iota(own.dtype, self.at.shape[2]) < own
        return _beyond(x, jnp.reshape(is_own, (-1, *[1] * (x.ndim - 1))), limit)

    def places(self, x: Any) -> Any:
        """Return the slots of positions in the order of blocks, beyond all of them for
        rows that are not sent.

        Args:
          x: positions, [rows of all blocks, …].
        """
        parts, count, slots = self.at.shape
        split = jnp.reshape(x, (count, -1, 1))
        block = lax.iota(x.dtype, count)[:, None, None]
        first, own = (
            jnp.swapaxes(y, 0, 1)[:, None].astype(x.dtype)
            for y in (self.first, self.own)
        )
        beyond = split - block * split.shape[1] - first
        slot = (block * parts + lax.iota(x.dtype, parts)) * slots + beyond
        limit = parts * count * slots
        is_own = (beyond >= 0) & (beyond < own)
        found = jnp.min(jnp.where(is_own, slot, limit), axis=2)
        found = jnp.reshape(found, x.shape)
        return _beyond(found, found < limit, limit)

    def to_parts(self, x: Any, dim: int) -> Any:
        """Return rows of parts, [parts, …], in the order of experts.

        Args:
          x: rows in the order of blocks, parts and slots along a dim.
        """
        x, (parts, blocks, slots) = jnp.moveaxis(x, dim, 0), self.at.shape
        sent = jnp.reshape(x, (blocks, parts, slots, *x.shape[1:]))
        found = self.ordered(jnp.swapaxes(sent, 0, 1), self.sources, x.shape[1:])
        return jnp.moveaxis(found, 1, dim + 1)

    def to_blocks(self, x: Any, dim: int) -> Any:
        """Return rows in the order of blocks, parts and slots along a dim.

        Args:
          x: rows of parts, [parts, …], in the order of experts.
        """
        x = jnp.moveaxis(x, dim + 1, 1)
        found = self.ordered(x, self.targets, rest := x.shape[2:])
        found = jnp.swapaxes(jnp.reshape(found, (*self.at.shape, *rest)), 0, 1)
        return jnp.moveaxis(jnp.reshape(found, (-1, *rest)), 0, dim)

    def ordered(self, x: Any, at: Any, rest: tuple[int, ...]) -> Any:
        """Return the rows of parts in another order, [parts, rows, …].

        Args:
          x: the rows of all parts.
          at: `sources` or `targets`; both are 0, 1, … where groups have one block.
          rest: sizes of further dims.
        """
        if at.shape[1] < self.at.shape[1]:
            x = jax.vmap(jax.vmap(_take))(jnp.reshape(x, (*at.shape, *rest)), at)
        return jnp.reshape(x, (len(at), -1, *rest))


def _starts(lengths: Any) -> Any:
    """Return where runs start, one after another, [parts, groups, …]."""
    flat = jnp.reshape(lengths, (*lengths.shape[:2], -1))
    return jnp.reshape(jnp.cumsum(flat, axis=2) - flat, lengths.shape)


def _take(x: Any, at: Any) -> Any:
    return x.at[at].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _beyond(x: Any, is_there: Any, limit: int) -> Any:
    """Return positions, each beyond a limit by itself where nothing is there."""
    each = lax.broadcasted_iota(x.dtype, x.shape, 0)
    return jnp.where(is_there, x, limit + each)


def _pieces(starts: Any, offsets: Any, size: int) -> Any:
    """Return 0, 1, …, each with the offset of the last run that starts there or before.

    Args:
      starts, offsets: [parts, groups, …], runs in order; the first starts at 0.
      size: how many.
    """
    starts, offsets = (jnp.reshape(x, (*x.shape[:2], 1, -1)) for x in (starts, offsets))
    at = lax.broadcasted_iota(starts.dtype, (1, 1, size, 1), 2)
    steps = jnp.diff(offsets, axis=3, prepend=0)
    return at[..., 0] + jnp.sum(jnp.where(at >= starts, steps, 0), axis=3)
