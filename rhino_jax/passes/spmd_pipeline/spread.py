"""Values of all micro-batches, spread over stages: each has some rows, or all of them.

m micro-batches, S stages, T = m + S - 1 ticks: micro-batch j is at tick j + p at the
stage that is p-th in a scan's direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


REDUCE: Mapping[str, Callable[..., Any]] = {
    "sum": jnp.sum,
    "prod": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "and": jnp.all,
    "or": jnp.any,
}


@dataclass(frozen=True, slots=True)
class StageAxis:
    """The mesh axis of stages, as seen by one of its devices.

    Attributes:
      name: its name.
      stages: number of stages.
      count: number of micro-batches.
      stage: index of this stage, traced.
    """

    name: str
    stages: int
    count: int
    stage: Any

    @property
    def ticks(self) -> int:
        return self.count + self.stages - 1

    def place(self, is_reversed: bool) -> Any:
        """Return how many stages come before this one in a scan's direction."""
        return self.stages - 1 - self.stage if is_reversed else self.stage

    def handed_on(self, x: Any, is_reversed: bool) -> Any:
        """Send an array to the next stage; return that of the one before.

        The first stage gets zeros.
        """
        pairs = [(i, i + 1) for i in range(self.stages - 1)]
        return self._sent(x, [(b, a) for a, b in pairs] if is_reversed else pairs)

    def whole(self, rows: Any) -> Any:
        """Gather [m/S, …] of each stage → [m, …]."""
        return jnp.reshape(self._each(lambda k: rows), (-1, *rows.shape[1:]))

    def rows_of_last(self, ticks: Any, is_reversed: bool) -> Any:
        """Distribute [T, …] of the last stage in a scan's direction → [m/S, …]."""
        last = 0 if is_reversed else self.stages - 1
        parts = self._parts(ticks[self.stages - 1 :])
        own = parts[last]
        for k in range(self.stages):
            if k != last:
                sent = self._sent(parts[k], [(last, k)])
                own = either(self.stage == k, sent, own)
        return own

    def rows_of_stack(self, ticks: Any, is_reversed: bool) -> Any:
        """Exchange [T, L/S, …] → [m/S, L, …]."""
        found = self._exchanged(self._own(ticks, is_reversed))
        found = jnp.moveaxis(found, 0, 1)
        return jnp.reshape(found, (found.shape[0], -1, *found.shape[3:]))

    def rows_of_parts(self, ticks: Any, is_reversed: bool, reducer: str) -> Any:
        """Reduce [T, …], each stage's own, over stages → [m/S, …]."""
        found = self._exchanged(self._own(ticks, is_reversed))
        return REDUCE[reducer](found, axis=0).astype(found.dtype)

    def together(self, x: Any, how: str) -> Any:
        """Reduce an array over all stages."""
        if how == "sum":
            return lax.psum(x, self.name)
        return REDUCE[how](self._each(lambda k: x), axis=0).astype(x.dtype)

    def _own(self, ticks: Any, is_reversed: bool) -> Any:
        start = self.place(is_reversed)
        return lax.dynamic_slice_in_dim(ticks, start, self.count, 0)

    def _exchanged(self, x: Any) -> Any:
        """Exchange [m, …] → [S, m/S, …]: each stage's values of this stage's rows."""
        parts = self._parts(x)

        def for_stage(k: int) -> Any:
            to = (self.stage + k) % self.stages
            return lax.dynamic_index_in_dim(parts, to, 0, keepdims=False)

        return self._each(for_stage)

    def _parts(self, x: Any) -> Any:
        """Reshape [m, …] → [S, m/S, …]."""
        return jnp.reshape(x, (self.stages, -1, *x.shape[1:]))

    def _each(self, given: Callable[[int], Any]) -> Any:
        """Return [S, …] of what every stage gives to this one, by permutes.

        All-gathers and all-to-alls of arrays that are sharded along axes left to XLA,
        it first gathers along these (TPU v5e and H100, jax 0.10.2).

        Args:
          given: function of k that returns what this stage gives to the one k later.
        """
        found = None
        for k in range(self.stages):
            to = [(i, (i + k) % self.stages) for i in range(self.stages)]
            part = self._sent(given(k), to) if k else given(k)
            if found is None:
                found = jnp.broadcast_to(part, (self.stages, *part.shape))
            else:
                at = (self.stage - k) % self.stages
                found = lax.dynamic_update_index_in_dim(found, part, at, 0)
        return found

    def _sent(self, x: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        """Permute an array by (source, target) stages; random keys as their bits."""
        if not is_key(x):
            return lax.ppermute(x, self.name, pairs)
        bits = lax.ppermute(jax.random.key_data(x), self.name, pairs)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))


def either(condition: Any, x: Any, y: Any) -> Any:
    """Select one of two arrays by a scalar."""
    return lax.select(jnp.broadcast_to(condition, x.shape), x, y)


def is_key(x: Any) -> bool:
    """Whether an array has random keys, whose bits are of a type of their own."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))
