"""One op as it runs on one shard, in the check of a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rhino_jax.frontend.check.shards import Shard


Results = list[np.ndarray]

Finish = Callable[[Results], Results]
"""A function from the primitive's results on a shard to the shard's results."""


@dataclass(frozen=True, slots=True)
class LocalOp:
    """One op on one shard.

    Attributes:
      name: the primitive's name.
      params: its parameters.
      shard: the device's part of the op.
      operands: local blocks, halos included.
      in_shapes: global shapes of the operands.
      out_shapes: local shapes of the results.
    """

    name: str
    params: Mapping[str, Any]
    shard: Shard
    operands: tuple[np.ndarray, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]

    def cut_factors(self, operand: int, dim: int) -> tuple[int, ...]:
        """Return the factors of an operand's dim that are sharded."""
        layout = self.shard.rule.operands[operand]
        return tuple(f for f in layout[dim] if self.shard.is_cut(f))

    def with_operands(self, *operands: np.ndarray) -> LocalOp:
        return replace(self, operands=operands)

    def with_params(self, **changed: Any) -> LocalOp:
        return replace(self, params={**self.params, **changed})
