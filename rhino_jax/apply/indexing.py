"""Index ops at the edges of sharded dims, where XLA's partitioner errs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.program import Op
from rhino_jax.ir.spec import Spec


UPDATE_SLICE = "dynamic_update_slice"


def with_clamped_starts(
    op: Op, operands: Sequence[Any], specs: Sequence[Spec | None]
) -> list[Any]:
    """Clamp the starts of an update along dims that the mesh shards.

    A start outside of the dim is clamped to it, by the semantics of the op. XLA's
    partitioner compares it with the range of each shard before that: it falls into
    none, and the update is lost (openxla/xla#49118).

    Args:
      op: the op.
      operands: its operands: an array, the update, and the starts.
      specs: how operands, then results, are held; None where the compiler decides.
    Returns:
      The operands; the same where the op is no such update.
    """
    if op.name != UPDATE_SLICE or op.rule is None:
        return list(operands)
    whole, update, *starts = operands
    held = specs[0], specs[-1]
    for d, factors in enumerate(op.rule.operands[0]):
        is_index = any(op.rule.factors[f].kind is FactorKind.INDEX for f in factors)
        if is_index and any(spec is None or spec[d] for spec in held):
            starts[d] = _clamped(starts[d], whole.shape[d] - update.shape[d])
    return [whole, update, *starts]


def _clamped(start: Any, most: int) -> Any:
    """Return a start within 0 and `most`, in its own integer type."""
    start = jnp.asarray(start)
    limit = min(most, int(jnp.iinfo(start.dtype).max))
    low, high = (jnp.asarray(x, start.dtype) for x in (0, limit))
    return jax.lax.clamp(low, start, high)
