"""Propagation of constants: values that a jaxpr computes from constants alone.

Scalars and short integer arrays are followed, through arithmetic and changes of shape:
the bounds and steps of loops, and the positions of windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from rhino_jax._compat import is_literal


MAX_KNOWN = 16
"""Maximal number of elements of an array that is followed: window positions, one per
dim."""

IDENTITIES = frozenset({"convert_element_type", "copy", "copy_p", "stop_gradient"})
"""Primitives whose result is the same number as their operand."""

Fold = Callable[[Any, Sequence[Any]], Any]
"""A function of an equation and the values of its operands."""


def _broadcast(eqn: Any, values: Sequence[Any]) -> np.ndarray:
    shape, dims = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    apart = [1] * len(shape)
    for d, size in zip(dims, values[0].shape, strict=True):
        apart[d] = size
    return np.broadcast_to(values[0].reshape(apart), shape)


def _reshaped(eqn: Any, values: Sequence[Any]) -> Any:
    return values[0].reshape(eqn.outvars[0].aval.shape)


ARITHMETIC: Mapping[str, Fold] = {
    "add": lambda eqn, values: values[0] + values[1],
    "sub": lambda eqn, values: values[0] - values[1],
    "mul": lambda eqn, values: values[0] * values[1],
    "max": lambda eqn, values: np.maximum(*values),
    "min": lambda eqn, values: np.minimum(*values),
}
"""Arithmetic primitive → what it computes."""

_FOLDS: Mapping[str, Fold] = {
    **ARITHMETIC,
    **dict.fromkeys(IDENTITIES, _reshaped),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda eqn, values: np.concatenate(values, eqn.params["dimension"]),
    "reshape": _reshaped,
    "squeeze": _reshaped,
}


def can_be_known(aval: Any) -> bool:
    """Whether values of a type are followed: real scalars and short integer arrays."""
    dtype, shape = getattr(aval, "dtype", None), getattr(aval, "shape", None)
    if not isinstance(dtype, np.dtype) or shape is None:
        return False
    if jnp.issubdtype(dtype, np.integer):
        return math.prod(shape) <= MAX_KNOWN
    is_real = jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.bool_)
    return is_real and shape == ()


def known_value(atom: Any, known: Mapping[Any, np.ndarray]) -> np.ndarray | None:
    """Return the value of a literal or a known variable; None where it is unknown."""
    if not is_literal(atom):
        return known.get(atom)
    return np.asarray(atom.val) if can_be_known(atom.aval) else None


def fold(eqn: Any, values: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return the value that an equation computes from known ones.

    Args:
      eqn: the equation.
      values: values of its operands; None where they are unknown.

    Returns:
      The value, in the type of the result; None where it is unknown.
    """
    compute = _FOLDS.get(eqn.primitive.name)
    if compute is None or any(v is None for v in values):
        return None
    made = eqn.outvars[0].aval
    if not can_be_known(made):
        return None
    with np.errstate(over="ignore"):  # integers wrap around, as on devices
        return np.asarray(compute(eqn, values)).astype(made.dtype)
