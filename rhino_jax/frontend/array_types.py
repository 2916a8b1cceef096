"""Shape and element type of abstract values."""

from __future__ import annotations

import functools
from numbers import Integral
from typing import Any

from jax.dtypes import float0

from rhino_jax.errors import TraceError


Type = tuple[tuple[int, ...], str]
"""Shape and element type."""


def type_of(aval: Any) -> Type:
    """Return shape and element type of an abstract value; tokens are scalars.

    Raises:
      TraceError: a dim is not a number.
    """
    shape = getattr(aval, "shape", ())
    dtype = getattr(aval, "dtype", "token")
    if all(type(d) is int for d in shape):
        return shape if type(shape) is tuple else tuple(shape), _name_of(dtype)
    if not all(isinstance(d, Integral) for d in shape):
        raise TraceError(
            "the program cannot be imported: it has a dim that is not a number.",
            numbers=f"shape {shape}",
            fix="trace the function with concrete shapes, not with symbolic ones.",
        )
    return tuple(int(d) for d in shape), _name_of(dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    return "float0" if dtype == float0 else str(dtype)
