"""Outputs of micro-batches, accumulated one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rhino_jax.frontend.rules.reduce import COMBINE, identity
from rhino_jax.passes.microbatch.cut import LoopCrossing


def sum_dtype(crossing: LoopCrossing, dtype: Any, accumulate: str = "float32") -> Any:
    """Return the dtype in which an output is accumulated.

    Args:
      crossing: the output.
      dtype: its dtype.
      accumulate: dtype of sums of narrower floats.
    """
    is_float = crossing.is_added and jnp.issubdtype(dtype, jnp.floating)
    return jnp.dtype(accumulate) if is_float and dtype.itemsize < 4 else dtype


def start(crossing: LoopCrossing, shape: Sequence[int], dtype: Any) -> Any:
    """Return the initial value of an accumulated output."""
    how = "sum" if crossing.is_added else crossing.how
    return lax.full(shape, identity(how, dtype) if how in COMBINE else 0, dtype)


def combined(how: str, so_far: Any, part: Any) -> Any:
    """Return an accumulated output after one more micro-batch.

    Args:
      how: see `LoopCrossing`.
      so_far: accumulated output of the micro-batches before.
      part: output of this micro-batch.
    """
    part = lax.convert_element_type(part, so_far.dtype)
    return part if how == "unchanged" else COMBINE[how](so_far, part)
