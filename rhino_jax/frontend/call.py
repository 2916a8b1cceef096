"""A call of a user's function, split into leaves, static values and signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rhino_jax._compat import is_on_host
from rhino_jax.frontend.leaves import (
    Leaves,
    Static,
    check_hashable,
    split_arguments,
)
from rhino_jax.frontend.objects.lift import Lifted, lift
from rhino_jax.frontend.parameters import Parameters
from rhino_jax.ir.printer import format_array


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, split into arrays and static values.

    Attributes:
      leaves: leaves of (args, kwargs), static arguments replaced by None.
      statics: (position or name, value) of the static arguments.
      args, kwargs: the trees of `leaves`, with mutable objects split into arrays and
        structure.
      lifted: these objects; None where there are none.
    """

    leaves: Leaves
    statics: tuple[tuple[str | int, Static], ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    lifted: Lifted | None = None

    def signature(self) -> Signature:
        return Signature(
            self.leaves.tree,
            self.statics,
            self.leaves.statics,
            self.leaves.positions,
            tuple(array_type(x) for x in self.leaves.arrays),
        )


ArrayType = tuple[tuple[int, ...], Any, bool, bool]
"""Shape, element type, whether the type is weak (a Python scalar's), and whether the
array is in the host's memory."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The key under which a function is traced once: everything but the arrays'
    contents."""

    tree: Any
    statics: tuple[tuple[str | int, Static], ...]
    static_leaves: tuple[tuple[int, Static], ...]
    positions: tuple[int, ...]
    arrays: tuple[ArrayType, ...]


def array_type(x: Any) -> ArrayType:
    """Return the type of anything that JAX accepts as an array."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    weak = bool(getattr(aval, "weak_type", False))
    return tuple(aval.shape), aval.dtype, weak, is_on_host(aval)


def type_text(x: Any) -> str:
    """Format the type of an array as `float32[8,16]`, `weak float32[]` for a Python
    scalar, or `float32[8,16] in host memory`."""
    shape, dtype, is_weak, on_host = array_type(x)
    end = " in host memory" if on_host else ""
    return f"{'weak ' if is_weak else ''}{format_array(dtype, shape)}{end}"


def split_call(
    parameters: Parameters,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    what: str = "`auto_shard`",
) -> Call:
    """Split a call into leaves and static values.

    Args:
      parameters: the parameters of the function.
      args, kwargs: the arguments.
      what: the caller, for messages.

    Raises:
      TraceError: a static value cannot be hashed.
    """
    left, named, statics = parameters.take_statics(args, kwargs)
    lifted = lift(left, named, parameters.is_of_nnx, named=True)
    if lifted is not None:
        left, named = lifted.args, lifted.kwargs
    leaves = split_arguments(left, named, parameters.names(len(left)))
    names = parameters.names(len(args))
    paths = [(names[k] if isinstance(k, int) else k, s) for k, s in statics]
    paths += [(leaves.paths[p], s) for p, s in leaves.statics]
    check_hashable(what, paths)
    return Call(leaves, statics, left, named, lifted)
