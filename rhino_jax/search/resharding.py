"""What it costs to change layouts: a table for every pair of lists of specs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.cost.collectives import collective_s
from rhino_jax.cost.reshard import reshard_steps
from rhino_jax.ir.program import Value
from rhino_jax.ir.spec import Spec, shards_per_dim
from rhino_jax.search.options import OptionBuilder
from rhino_jax.search.sizes import PortSpecs


TIE_S = 1e-12
"""Price of any change of layout that costs nothing else, so that ties are broken
towards no change; far below the nanosecond in which objectives are compared."""


@dataclass(slots=True, eq=False)
class ReshardTables:
    """Reshard costs between lists of specs: seconds = fixed + bytes · per_byte.

    Attributes:
      builder: its spec table numbers the specs.
      fixed_s, s_per_byte: for every pair of specs met; NaN where not met yet.
    """

    builder: OptionBuilder
    fixed_s: np.ndarray
    s_per_byte: np.ndarray
    _kinds: tuple[int, ...]
    _priced: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
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
        links = [
            (a.size, a.alpha_s, a.bytes_per_s, a.topology) for a in builder.mesh.axes
        ]
        return cls(
            builder,
            np.full((count, count), np.nan),
            np.full((count, count), np.nan),
            tuple(links.index(link) for link in links),
        )

    def _meet(self, a: int, b: int) -> None:
        """Price one pair of specs."""
        specs, sizes = self.builder.sizes.table.specs, self.builder.mesh.sizes
        # Dims that stay as they are make all that is sent smaller, and no more.
        pairs = [(d, w) for d, w in zip(specs[a], specs[b], strict=True) if d != w]
        cut = math.prod(
            sizes[x]
            for d, w in zip(specs[a], specs[b], strict=True)
            if d == w
            for x in d
        )
        key = self._alike(pairs)
        found = self._priced.get(key)
        if found is None:
            src, dst = (tuple(pair[k] for pair in pairs) for k in (0, 1))
            found = self._priced[key] = self._price(src, dst)
        self.fixed_s[a, b], self.s_per_byte[a, b] = found[0], found[1] / cut

    def _alike(
        self, pairs: Sequence[tuple[tuple[int, ...], ...]]
    ) -> tuple[object, ...]:
        """Pairs of dims with their axes numbered as they are met, equal axes alike:
        what differs only in which of several equal axes it names costs the same."""
        names: dict[int, tuple[int, int]] = {}
        counts = [0] * len(self._kinds)
        key: list[object] = []
        for pair in pairs:
            for dim in pair:
                for axis in dim:
                    name = names.get(axis)
                    if name is None:
                        kind = self._kinds[axis]
                        name = names[axis] = (kind, counts[kind])
                        counts[kind] += 1
                    key.append(name)
                key.append(None)
        return tuple(key)

    def _price(self, src: Spec, dst: Spec) -> tuple[float, float]:
        """Fixed seconds and seconds per byte of one reshard."""
        if src == dst:
            return 0.0, 0.0
        mesh = self.builder.mesh
        # Any change of layout is at least a copy of the new shard, and among free
        # ones none is preferred to some.
        cut = math.prod(shards_per_dim(dst, mesh.sizes))
        fixed, per_byte = TIE_S, 2 / cut / self.builder.target.hbm_bytes_per_s
        # Steps scale with the bytes: take them for 2^40 bytes and divide.
        whole = 1 << 40
        for step in reshard_steps(
            src,
            dst,
            whole,
            mesh.sizes,
            by_axis=mesh.gathers_by_axis,
            says_stops=mesh.says_stops,
        ):
            alpha, s_per_byte = self._link(step.kind, step.axes)
            fixed += alpha
            per_byte += s_per_byte * step.local_bytes / whole
        return fixed, per_byte

    def _link(self, kind: str, axes: tuple[int, ...]) -> tuple[float, float]:
        """Fixed seconds of a collective, and seconds per byte on one device."""
        found = self._links.get((kind, axes))
        if found is None:
            every = [self.builder.mesh.axes[a] for a in axes]
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
        """Seconds for every option of the source and of the target.

        Args:
          source, target: specs at both ends.
          whole: the value.
          count: how often it is carried.
          latency_count: how often latency is paid.
        """
        met = source.key, target.key, whole.shape, whole.bytes, count, latency_count
        found = self._of_values.get(met)
        if found is not None:
            return found
        # Values of other shapes may have equal tables: these are one array.
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
            for i, j in np.argwhere(np.isnan(self.fixed_s[where])):
                self._meet(source.unique[i], target.unique[j])
            found = self._lists[key] = (self.fixed_s[where], self.s_per_byte[where])
        return found

    def copies(self, source: PortSpecs, target: PortSpecs, whole: Value) -> np.ndarray:
        """Bytes of the resharded copy for every pair; 0 where none is made."""
        held = self.builder.sizes.held_bytes(target, whole)
        # One array for all values alike.
        key = (source.key, target.key, id(held))
        found = self._copies.get(key)
        if found is None:
            fixed, _ = self._coefficients(source, target)
            moved = (fixed > 0)[np.ix_(source.index, target.index)]
            found = moved * held[None, :]
            self._copies[key] = found
        return found
