"""Captures of a function: closure, globals, defaults, the object that it is bound
to."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import jax

from rhino_jax._compat import JITTED
from rhino_jax.errors import TraceError


_AT_MOST = 2_000
"""Maximal number of functions that are searched."""

PLAIN = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    jax.Array,
)
"""Types whose values cannot hold a leaked tracer."""


def refuse_objects(fn: Any, error: Exception, what: str, name: str) -> None:
    """Refuse Flax NNX objects that a function captures and changes.

    Args:
      fn: the user's function.
      error: the exception that the trace raised.
      what: the caller, for messages.
      name: name of the function.

    Raises:
      TraceError: names the objects, if the error is about them.
    """
    if type(error).__name__ != "TraceContextError":
        return
    found = [
        path
        for path, x in reached_by(fn)
        if any(kind.__module__.startswith("flax.nnx") for kind in type(x).__mro__)
    ]
    if not found:  # an inner function captures an object of an outer one
        return
    where = ", ".join(dict.fromkeys(found))
    raise TraceError(
        f"{what}: `{name}` changes an object that it captures, and that change would be"
        " lost.",
        where=where,
        numbers=f"{error}; nothing has run",
        fix=f"make {where} an argument of `{name}`: it is written back then.",
    ) from error


def reached_by(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the captures of a function and of the functions that it
    captures."""
    for inner in functions_reached_by(fn):
        for name, value in _captured(inner):
            if not isinstance(value, (*_FUNCTIONS, *PLAIN)):
                yield name, value


def functions_reached_by(fn: Any) -> Iterator[Any]:
    """Yield the function, and the user's functions that it captures, transitively."""
    seen: set[int] = set()
    left = [fn]
    while left and len(seen) < _AT_MOST:
        fn = left.pop()
        if id(fn) in seen:
            continue
        seen.add(id(fn))
        yield fn
        left += [
            value
            for _, value in _captured(fn)
            if isinstance(value, _FUNCTIONS) and not _is_library(value)
        ]


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, JITTED)


def _captured(fn: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(fn, functools.partial):
        yield "fn", fn.func
        yield from ((f"args[{i}]", x) for i, x in enumerate(fn.args))
        yield from fn.keywords.items()
    elif isinstance(fn, types.MethodType):
        yield "self", fn.__self__
        yield "fn", fn.__func__
    elif isinstance(fn, types.FunctionType):
        yield from _of_function(fn)
    elif isinstance(fn, JITTED):
        yield "fn", fn.__wrapped__  # type: ignore[attr-defined]
    else:
        yield "self", fn
        yield "fn", inspect.getattr_static(type(fn), "__call__", None)


def _of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell
            continue
    for name in names_used(fn.__code__):
        if name in fn.__globals__:
            yield name, fn.__globals__[name]
    for i, value in enumerate(fn.__defaults__ or ()):
        yield f"default {i}", value
    yield from (fn.__kwdefaults__ or {}).items()


def names_used(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function and the functions defined in it use."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_used(inner)


def _is_library(fn: Any) -> bool:
    return (getattr(fn, "__module__", None) or "").split(".")[0] in LIBRARIES


LIBRARIES = ("jax", "optax", "flax", "equinox", "numpy")
"""Libraries whose functions capture nothing of the user's."""
