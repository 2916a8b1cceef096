"""What a function keeps of its trace in objects that it can reach.

Such a value is dead when the trace ends: a state that is kept so (an attribute of a
plain object, a list outside of the function) is never updated again, without a word.
Objects are compared before and after the trace, and given back what they held.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import jax

from rhino_jax._compat import is_outermost
from rhino_jax.errors import TraceError
from rhino_jax.frontend.tracing.captured import PLAIN, reached_by


_DEPTH = 4
"""How deep objects within objects are looked at."""

_AT_MOST = 2_000
"""How many objects are looked at: a trace must not wait for this."""


class Watch:
    """What a function can reach, as it was before the trace.

    Args:
      fn: the user's function.
      statics: (path, value) of arguments that are no arrays.
    """

    def __init__(
        self, fn: Callable[..., Any], statics: Iterable[tuple[str, Any]]
    ) -> None:
        self._before: dict[int, tuple[str, Any, Any]] = {}
        self._is_on = is_outermost()
        if self._is_on:
            for path, value in (*statics, *reached_by(fn)):
                self._look(path, value, 0)

    def _look(self, path: str, value: Any, depth: int) -> None:
        if depth > _DEPTH or len(self._before) >= _AT_MOST or id(value) in self._before:
            return
        items = _items(value)
        if items is None:
            return
        self._before[id(value)] = (path, value, dict(items))
        for name, inner in items.items():
            if not isinstance(inner, PLAIN):
                self._look(path + _step(value, name), inner, depth + 1)

    def check(self, what: str, name: str) -> None:
        """Refuse a function that kept a tracer, and take that back.

        Raises:
          TraceError: names the first of what was changed.
        """
        leaks = []
        for path, value, before in self._before.values():
            after = _items(value) or {}
            for key, now in after.items():
                if before.get(key, _NOTHING) is now or not _holds_tracer(now):
                    continue
                _restore(value, key, before)
                if not _is_cached_property(value, key):
                    leaks.append((path + _step(value, key), now))
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


_NOTHING = object()


def _items(value: Any) -> dict[Any, Any] | None:
    """What a mutable object holds, by attribute, key or number; None if it is none."""
    if isinstance(value, list | dict):
        if len(value) > _AT_MOST:
            return None
        return dict(enumerate(value)) if isinstance(value, list) else dict(value)
    if isinstance(value, PLAIN) or inspect.isroutine(value):
        return None
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError, ValueError):
        return None


def _step(value: Any, key: Any) -> str:
    return f"[{key!r}]" if isinstance(value, list | dict) else f".{key}"


def _holds_tracer(value: Any) -> bool:
    if isinstance(value, PLAIN) and not isinstance(value, jax.core.Tracer):
        return False
    try:
        leaves = jax.tree.leaves(value)
    except Exception:  # a container with keys that cannot be sorted
        return False
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def _is_cached_property(value: Any, key: Any) -> bool:
    """Whether it is only remembered: it is computed again by the next who asks."""
    kind = getattr(type(value), key, None) if isinstance(key, str) else None
    return isinstance(kind, functools.cached_property)


def _restore(value: Any, key: Any, before: dict[Any, Any]) -> None:
    if isinstance(value, list):
        value[:] = list(before.values())
        return
    held: MutableMapping[Any, Any] = value if isinstance(value, dict) else vars(value)
    if key in before:
        held[key] = before[key]
    else:
        held.pop(key, None)
