"""Costs of resharding: a table for every pair of lists of specs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.cost.collectives import collective_s
from rhino_jax.cost.reshard import reshard_steps
from rhino_jax.ir.program import Value
from rhino_jax.ir.spec import Spec, num_shards, shards_per_dim
from rhino_jax.model.constants import CONSTANTS
from rhino_jax.model.options import OptionBuilder
from rhino_jax.model.sizes import PortSpecs


_KEPT = -1
"""Stands for a dim whose sharding does not change."""

_MAX_DIMS = 1 << 20
"""More than the tuples of axes that shard dims: a change from one to another has the
number of the first, times this, plus that of the second."""


@dataclass(slots=True, eq=False)
class ReshardTables:
    """Reshard costs between lists of specs: seconds = fixed + bytes · per_byte.

    Attributes:
      builder: the builder of the options; its spec table numbers the specs.
      fixed_s, s_per_byte: [specs, specs], the costs of pairs of specs; NaN where not
        computed yet.
    """

    builder: OptionBuilder
    fixed_s: np.ndarray
    s_per_byte: np.ndarray
    _dims: list[tuple[int, ...]] = field(default_factory=list)
    _dim_numbers: dict[tuple[int, ...], int] = field(default_factory=dict)
    _numbers: dict[int, list[int]] = field(default_factory=dict)
    _priced: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    _changes: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)
    _lists: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict
    )
    _links: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = field(
        default_factory=dict
    )
    _tables: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)
    _of_values: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)
    _copies: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, builder: OptionBuilder) -> ReshardTables:
        count = len(builder.sizes.table.specs)
        return cls(
            builder,
            np.full((count, count), np.nan),
            np.full((count, count), np.nan),
        )

    def _meet(self, a: np.ndarray, b: np.ndarray) -> None:
        """Compute the costs of pairs of specs of one rank, given by their ids."""
        have, want = self._dims_of(a), self._dims_of(b)
        is_kept = have == want
        # Dims whose sharding does not change only divide the bytes that are sent.
        pieces = np.array(
            [num_shards(dim, self.builder.mesh.sizes) for dim in self._dims]
        )
        cut = np.where(is_kept, pieces[have], 1).prod(1)
        changed = np.where(is_kept, _KEPT, have * _MAX_DIMS + want)
        moved = np.take_along_axis(changed, np.argsort(is_kept, 1, kind="stable"), 1)
        unique, index = np.unique(moved, axis=0, return_inverse=True)
        prices = np.array([self._price_of(tuple(row)) for row in unique.tolist()])
        prices = prices[index.ravel()]
        self.fixed_s[a, b], self.s_per_byte[a, b] = prices[:, 0], prices[:, 1] / cut

    def _dims_of(self, specs: np.ndarray) -> np.ndarray:
        """Return [specs, rank], the number of each dim's tuple of axes."""
        every = self.builder.sizes.table.specs
        for s in set(specs.tolist()) - self._numbers.keys():
            self._numbers[s] = [self._number(dim) for dim in every[s]]
        return np.array([self._numbers[s] for s in specs.tolist()], np.int64)

    def _number(self, dim: tuple[int, ...]) -> int:
        found = self._dim_numbers.get(dim)
        if found is None:
            found = self._dim_numbers[dim] = len(self._dims)
            self._dims.append(dim)
        return found

    def _price_of(self, changed: tuple[int, ...]) -> tuple[float, float]:
        """Return the cost of changing the sharding of dims, given as numbers of
        (before, after) pairs, those of dims that change first."""
        while changed and changed[-1] == _KEPT:
            changed = changed[:-1]
        found = self._changes.get(changed)
        if found is None:
            pairs = [
                (self._dims[x // _MAX_DIMS], self._dims[x % _MAX_DIMS]) for x in changed
            ]
            key = self._alike(pairs)
            found = self._priced.get(key)
            if found is None:
                src, dst = (tuple(pair[k] for pair in pairs) for k in (0, 1))
                found = self._priced[key] = self._price(src, dst)
            self._changes[changed] = found
        return found

    def _alike(
        self, pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> tuple[object, ...]:
        """Return pairs of dims with their axes renumbered in order of appearance, by
        kind: pairs that differ only in which of several equal axes they name cost the
        same."""
        names: dict[int, tuple[int, int]] = {}
        kinds = self.builder.mesh.kinds
        counts = [0] * len(kinds)
        key: list[object] = []
        for pair in pairs:
            for dim in pair:
                for axis in dim:
                    name = names.get(axis)
                    if name is None:
                        kind = kinds[axis]
                        name = names[axis] = (kind, counts[kind])
                        counts[kind] += 1
                    key.append(name)
                key.append(None)
        return tuple(key)

    def _price(self, src: Spec, dst: Spec) -> tuple[float, float]:
        """Return the fixed seconds and the seconds per byte of one reshard."""
        if src == dst:
            return 0.0, 0.0
        mesh = self.builder.mesh
        # Any change of layout is at least a copy of the new shard; among free changes,
        # the tie breaks towards no change.
        cut = math.prod(shards_per_dim(dst, mesh.sizes))
        fixed, per_byte = (
            CONSTANTS.tie_s,
            2 / cut / self.builder.target.device.hbm_bytes_per_s,
        )
        # Steps scale with the bytes: compute them for 2^40 bytes and divide.
        whole = 1 << 40
        for step in reshard_steps(src, dst, whole, mesh.sizes, mesh.lowering):
            alpha, s_per_byte = self._link(step.kind, step.axes)
            fixed += alpha
            per_byte += s_per_byte * step.local_bytes / whole
        return fixed, per_byte

    def _link(self, kind: str, axes: tuple[int, ...]) -> tuple[float, float]:
        """Return the fixed seconds of a collective, and its seconds per byte on one
        device."""
        found = self._links.get((kind, axes))
        if found is None:
            every = self.builder.mesh.over(axes)
            alpha = collective_s(kind, 0.0, every)
            many = float(1 << 40)
            found = alpha, (collective_s(kind, many, every) - alpha) / many
            self._links[kind, axes] = found
        return found

    def table(
        self,
        source: PortSpecs,
        target: PortSpecs,
        whole: Value,
        count: float,
        latency_count: float,
    ) -> np.ndarray:
        """Return the seconds of resharding, [options of the source, options of the
        target].

        Args:
          source, target: specs at both ends.
          whole: the value.
          count: how often it is carried per step.
          latency_count: how often latency is paid per step.
        """
        met = source.key, target.key, whole.shape, whole.bytes, count, latency_count
        found = self._of_values.get(met)
        if found is not None:
            return found
        # Values of different shapes may have equal tables, which share one array.
        paddings = [
            self.builder.sizes.paddings(p, whole.shape) for p in (source, target)
        ]
        is_padded = any(p is not None for p in paddings)
        shape = whole.shape if is_padded else None
        key = (source.key, target.key, whole.bytes, count, latency_count, shape)
        found = self._tables.get(key)
        if found is None:
            fixed, per_byte = self._coefficients(source, target)
            small = fixed * latency_count + per_byte * whole.bytes * count
            if is_padded:
                have, want = (1.0 if p is None else p for p in paddings)
                most = np.maximum(np.reshape(have, (-1, 1)), np.reshape(want, (1, -1)))
                small = small + per_byte * whole.bytes * count * (most - 1)
            found = small[np.ix_(source.index, target.index)]
            self._tables[key] = found
        self._of_values[met] = found
        return found

    def _coefficients(
        self, source: PortSpecs, target: PortSpecs
    ) -> tuple[np.ndarray, np.ndarray]:
        key = (source.key, target.key)
        found = self._lists.get(key)
        if found is None:
            where = np.ix_(source.unique, target.unique)
            rows, columns = np.nonzero(np.isnan(self.fixed_s[where]))
            if len(rows):
                self._meet(
                    np.array(source.unique)[rows], np.array(target.unique)[columns]
                )
            found = self._lists[key] = (self.fixed_s[where], self.s_per_byte[where])
        return found

    def copies(self, source: PortSpecs, target: PortSpecs, whole: Value) -> np.ndarray:
        """Return the bytes of the resharded copy for every pair of options; 0 where
        there is none."""
        held = self.builder.sizes.held_bytes(target, whole)
        # One shared array for all values of equal size.
        key = (source.key, target.key, id(held))
        found = self._copies.get(key)
        if found is None:
            fixed, _ = self._coefficients(source, target)
            moved = (fixed > 0)[np.ix_(source.index, target.index)]
            found = moved * held[None, :]
            self._copies[key] = found
        return found
