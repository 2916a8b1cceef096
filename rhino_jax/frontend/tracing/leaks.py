"""Leaks: tracers that a function stores in objects that it can reach.

Such a value is dead when the trace ends: state that is stored so (an attribute of a
plain object, a list outside the function, a variable that it declares `nonlocal` or
`global`) is silently never updated again. Everything that can hold one is compared
before and after the trace, and restored.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from rhino_jax._compat import is_outermost
from rhino_jax.errors import TraceError
from rhino_jax.frontend.tracing.captured import (
    PLAIN,
    functions_reached_by,
    reached_by,
)
from rhino_jax.frontend.tracing.holders import (
    NOTHING,
    Variables,
    items,
    restore,
    step,
    within,
)


_AT_MOST = 2_000
"""Maximal number of objects that are searched, to bound the time of a trace."""


class LeakWatch:
    """A snapshot of everything that a function can reach, taken before its trace.

    Args:
      fn: the user's function.
      statics: (path, value) of arguments that are no arrays.
    """

    def __init__(
        self, fn: Callable[..., Any], statics: Iterable[tuple[str, Any]]
    ) -> None:
        self._before: dict[int, tuple[str, Any, dict[Any, Any]]] = {}
        if is_outermost():
            self._look(deque((*statics, *reached_by(fn), *_variables(fn))))

    def _look(self, left: deque[tuple[str, Any]]) -> None:
        """Record the items of holders, breadth first, so that distant ones are cut off
        at the limit."""
        while left and len(self._before) < _AT_MOST:
            path, value = left.popleft()
            if id(value) in self._before:
                continue
            held = items(value)
            if held is not None:
                self._before[id(value)] = (path, value, held)
                left.extend(within(path, value, held))

    def check(self, what: str, name: str) -> None:
        """Refuse a function that stored a tracer, after restoring the old value.

        Args:
          what: the caller, for messages.
          name: name of the function.

        Raises:
          TraceError: names the first of the changed places.
        """
        leaks = []
        for path, value, before in self._before.values():
            for key, now in (items(value) or {}).items():
                if before.get(key, NOTHING) is now or not _holds_tracer(now):
                    continue
                restore(value, key, before)
                if not _is_cached_property(value, key):
                    leaks.append((step(path, value, key), now))
        if not leaks:
            return
        path, now = leaks[0]
        tracer = next(x for x in jax.tree.leaves(now) if isinstance(x, jax.core.Tracer))
        more = f", and {len(leaks) - 1} more" if len(leaks) > 1 else ""
        raise TraceError(
            f"{what}: `{name}` keeps a value of its trace in `{path}`{more}: updates of"
            " it would be lost, since only the first call runs the Python code.",
            where=path,
            numbers=f"{tracer.aval.str_short()}; nothing has run, and `{path}` is as it"
            " was",
            fix="return the value, and pass the state as an argument; or hold it in a"
            " `flax.nnx.Module`, an `equinox.nn.State` or a `jax.new_ref`, and pass"
            " that.",
        )


def _variables(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables and attributes of functions, and the classes of class
    methods."""
    for inner in functions_reached_by(fn):
        if isinstance(inner, types.FunctionType):
            yield inner.__name__, Variables(inner)
            yield f"{inner.__name__}.__dict__", vars(inner)
        elif isinstance(inner, types.MethodType) and isinstance(inner.__self__, type):
            yield inner.__self__.__qualname__, inner.__self__


def _holds_tracer(value: Any) -> bool:
    if isinstance(value, PLAIN) and not isinstance(value, jax.core.Tracer):
        return False
    try:
        leaves = jax.tree.leaves(value)
    except Exception:  # a container with keys that cannot be sorted
        return False
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def _is_cached_property(value: Any, key: Any) -> bool:
    """Whether an item is the cache of a property, which is recomputed on the next
    access."""
    kind = getattr(type(value), key, None) if isinstance(key, str) else None
    return isinstance(kind, functools.cached_property)
