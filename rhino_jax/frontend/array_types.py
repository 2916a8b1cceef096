"""Shape and element type of abstract values."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from jax.dtypes import float0

from rhino_jax.errors import TraceError


Type = tuple[tuple[int, ...], str]
"""Shape and element type."""


def type_of(aval: Any) -> Type:
    """Shape and element type of an abstract value; tokens are scalars.

    Raises:
      TraceError: a dim is not a number.
    """
    shape = getattr(aval, "shape", ())
    if not all(isinstance(d, Integral) for d in shape):
        raise TraceError(
            "the program cannot be imported: it has a dim that is not a number.",
            numbers=f"shape {shape}",
            fix="trace the function with concrete shapes, not with symbolic ones.",
        )
    dtype = getattr(aval, "dtype", "token")
    name = "float0" if dtype == float0 else str(dtype)
    return tuple(int(d) for d in shape), name
