"""The factor or dim of each mesh axis in every strategy of a list, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.model.strategies import Strategy


NOWHERE = -1
"""Stands for no factor and no dim; as an index, it selects the last one."""


@dataclass(frozen=True, slots=True, eq=False)
class AxisPlaces:
    """The positions of mesh axes in the strategies of a node, NOWHERE where an axis is
    unused.

    Attributes:
      cut: [strategies, axes], the factor of an op that each axis shards; for a node
        that is no op, the dim.
      scattered: for every result, [strategies, axes], the dim that each axis shards
        only once partial results are combined (reduce-scatter).
    """

    cut: np.ndarray
    scattered: tuple[np.ndarray, ...]

    @property
    def all(self) -> range:
        """All axes of the mesh."""
        return range(self.cut.shape[1])

    @classmethod
    def of(
        cls, strategies: Sequence[Strategy], num_axes: int, *, is_op: bool
    ) -> AxisPlaces:
        """Build the arrays for the strategies of one node."""
        size = len(strategies), num_axes
        cut = np.full(size, NOWHERE, np.int64)
        num_results = len(strategies[0].results)
        scattered = tuple(np.full(size, NOWHERE, np.int64) for _ in range(num_results))
        for k, strategy in enumerate(strategies):
            for place, axes in enumerate(
                strategy.cut if is_op else strategy.results[0]
            ):
                for axis in axes:
                    cut[k, axis] = place
            if strategy.made == strategy.results:
                continue
            for r, (made, done) in enumerate(
                zip(strategy.made, strategy.results, strict=True)
            ):
                for dim, (before, after) in enumerate(zip(made, done, strict=True)):
                    for axis in after[len(before) :]:
                        scattered[r][k, axis] = dim
        return cls(cut, scattered)
