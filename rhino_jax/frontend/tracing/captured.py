"""Captures of a function: closure, globals, defaults, the object that it is bound to.
References (`jax.new_ref`) among them are inputs, and results.

As under `jax.jit`, every call reads the current values of references, and writes back
those that the function wrote.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rhino_jax._compat import (
    JITTED,
    discharged,
    is_outermost,
    low_jaxpr,
    open_jaxpr,
    ref_value,
    references_as_arguments,
    set_ref_value,
    with_eqns,
)
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
            if isinstance(value, _FUNCTIONS)
            and (getattr(value, "__module__", None) or "").split(".")[0]
            not in LIBRARIES
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
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        for name, cell in cells:
            with contextlib.suppress(ValueError):  # an empty cell
                yield name, cell.cell_contents
        for name in names_used(fn.__code__):
            if name in fn.__globals__:
                yield name, fn.__globals__[name]
        yield from ((f"default {i}", x) for i, x in enumerate(fn.__defaults__ or ()))
        yield from (fn.__kwdefaults__ or {}).items()
    elif isinstance(fn, JITTED):
        yield "fn", fn.__wrapped__  # type: ignore[attr-defined]
    else:
        yield "self", fn
        yield "fn", inspect.getattr_static(type(fn), "__call__", None)


def names_used(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function and the functions defined in it use."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_used(inner)


LIBRARIES = ("jax", "optax", "flax", "equinox", "numpy")
"""Libraries whose functions capture nothing of the user's."""


@dataclass(frozen=True, slots=True)
class CapturedReferences:
    """The references that a function captures.

    Attributes:
      references: the references; the last of the program's constants.
      names: their names in the function's code.
      written: positions among them of those that it writes to, whose final values are
        the last of the program's results.
    """

    references: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    written: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.references)

    def values(self) -> list[Any]:
        """Return their current values: the arrays themselves; inside a trace,
        tracers."""
        if is_outermost():
            return [ref_value(r) for r in self.references]
        return [r[...] for r in self.references]

    def split(self, outs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Split all results of a run into the function's own, and those to write
        back."""
        first = len(outs) - len(self.written)
        return list(outs[:first]), list(outs[first:])

    def write(self, after: Sequence[Any]) -> None:
        """Set the references to their results of a run."""
        for k, value in zip(self.written, after, strict=True):
            if is_outermost():
                set_ref_value(self.references[k], value)
            else:
                self.references[k][...] = value

    def keep(self, before: Sequence[Any], placed: Sequence[Any]) -> None:
        """Set references that are only read to their moved arrays, to move them once
        only.

        Args:
          before: their values before the move.
          placed: the moved arrays.
        """
        if not is_outermost():
            return
        for k, (old, new) in enumerate(zip(before, placed, strict=True)):
            if old is not new and k not in self.written:
                set_ref_value(self.references[k], new)

    def check(self, arguments: Sequence[Any], name: str) -> None:
        """Refuse a reference that is captured and given as an argument as well.

        Args:
          arguments: references among the arguments of a call.
          name: name of the function.

        Raises:
          TraceError: one is both.
        """
        for text, captured in zip(self.names, self.references, strict=True):
            if any(captured is given for given in arguments):
                raise TraceError(
                    f"`{name}` captures a reference that it is given as an"
                    " argument as well, and what is written to one would not be read"
                    " from the other.",
                    where=text,
                    numbers=f"{jax.typeof(captured)}; nothing has run",
                    fix=f"let `{name}` use its argument alone, or leave that out.",
                )


def as_values(jaxpr: Any, fn: Any) -> tuple[Any, CapturedReferences]:
    """Return a traced function without high-level primitives and captured references.

    Args:
      jaxpr: closed, as traced.
      fn: the user's function.

    Returns:
      The closed jaxpr, whose last arguments are the references' values, and whose last
      results are the final values of those that are written to; and the references.
    """
    jaxpr, references, is_written = references_as_arguments(jaxpr)
    jaxpr = low_jaxpr(jaxpr)
    if not references:
        return jaxpr, CapturedReferences()
    count = len(open_jaxpr(jaxpr).outvars)
    jaxpr = discharged(jaxpr)
    opened = open_jaxpr(jaxpr)
    written = [k for k, changes in enumerate(is_written) if changes]
    outs = [*opened.outvars[:count], *(opened.outvars[count + k] for k in written)]
    return with_eqns(jaxpr, opened.eqns, outs), CapturedReferences(
        tuple(references), _names(references, fn), tuple(written)
    )


def _names(references: Sequence[Any], fn: Any) -> tuple[str, ...]:
    """Return a unique name for each reference."""
    known: dict[int, str] = {}
    for path, value in reached_by(fn):
        known.setdefault(id(value), path)
    names: list[str] = []
    for reference in references:
        name, k = known.get(id(reference), "reference"), 2
        while name in names:
            name, k = f"{name.split(' #')[0]} #{k}", k + 1
        names.append(name)
    return tuple(names)
