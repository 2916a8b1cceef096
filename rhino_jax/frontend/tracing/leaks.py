"""Leaks: tracers that a function stores in objects that it can reach.

Such a value is dead when the trace ends: state that is stored so (an attribute of a
plain object, a list outside the function, a variable that it declares `nonlocal` or
`global`) is silently never updated again. Everything that can hold one is compared
before and after the trace, and restored.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rhino_jax._compat import is_outermost
from rhino_jax.errors import TraceError
from rhino_jax.frontend.tracing.captured import (
    LIBRARIES,
    PLAIN,
    functions_reached_by,
    names_used,
    reached_by,
)


_MAX_ITEMS = 2_000
"""Longer containers are not searched, to bound the time of a trace."""

NOTHING = object()
"""Stands for the absence of a value."""

_LEAVES = (str, bytes, int, float, complex, type(None), jax.Array, np.generic)
_WITH_PYTHON = sys.stdlib_module_names - {"__main__"}
_LISTS = (list, deque)


@dataclass(frozen=True, slots=True)
class Variables:
    """The variables that a function may rebind: `nonlocal` and `global` names."""

    fn: types.FunctionType

    def items(self) -> dict[str, Any]:
        code = self.fn.__code__
        space = self.fn.__globals__
        found = {name: space[name] for name in names_used(code) if name in space}
        for name, cell in zip(code.co_freevars, self.fn.__closure__ or (), strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # an empty cell
                found.pop(name, None)
        return found

    def place(self, name: str) -> tuple[Any, str]:
        """Return the cell or dict that holds a variable, and its key there."""
        free = self.fn.__code__.co_freevars
        if name in free:
            return (self.fn.__closure__ or ())[free.index(name)], "cell_contents"
        return self.fn.__globals__, name


def items(value: Any) -> dict[Any, Any] | None:
    """Return the values in a holder, by attribute, key or number; None if it holds
    nothing."""
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, Variables):
        return value.items()
    if isinstance(value, list | deque | tuple | dict):
        if len(value) > _MAX_ITEMS:
            return None
        return dict(value) if isinstance(value, dict) else dict(enumerate(value))
    if isinstance(value, np.ndarray):
        is_short = value.dtype == object and value.size <= _MAX_ITEMS
        return dict(enumerate(value.flat)) if is_short else None
    if isinstance(value, type | types.ModuleType):
        return dict(vars(value)) if _is_users(value) else None
    if inspect.isroutine(value):
        return None
    held = dict(_slots(value))
    try:
        held.update(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError, ValueError):
        return held or None
    return held


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        if "__slots__" not in vars(kind):
            continue
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # an unset slot
                    continue


def within(path: str, value: Any, held: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield path and value of the items of a holder, and of its class, which may hold
    more."""
    for key, inner in held.items():
        if not isinstance(inner, _LEAVES):
            yield step(path, value, key), inner
    kind = type(value)
    if not isinstance(value, type) and _is_users(kind):
        yield kind.__qualname__, kind


def step(path: str, value: Any, key: Any) -> str:
    """Return the path of the item `key` of `value`, which is at `path`."""
    if isinstance(value, Variables):
        return str(key)
    if isinstance(value, list | deque | tuple | dict | np.ndarray):
        return f"{path}[{key!r}]"
    return f"{path}.{key}"


def restore(value: Any, key: Any, before: dict[Any, Any]) -> None:
    """Restore the item `key` of `value` as it was before; for lists, all items."""
    old = before.get(key, NOTHING)
    if isinstance(value, _LISTS):
        value.clear()
        value.extend(before.values())
        return
    remove: Callable[..., None] = operator.delitem
    put: Callable[..., None] = operator.setitem
    if isinstance(value, Variables):
        value, key = value.place(key)
    if isinstance(value, type | types.CellType):
        remove, put = delattr, setattr
    elif isinstance(value, np.ndarray):
        value = value.flat
    elif not isinstance(value, dict):
        held = getattr(value, "__dict__", {})
        if key in held:
            value = held
        else:
            # Past the class's own `__setattr__`: it may be frozen.
            remove, put = object.__delattr__, object.__setattr__
    if old is NOTHING:
        remove(value, key)
    else:
        put(value, key, old)


def _is_users(value: type | types.ModuleType) -> bool:
    """Whether a class or module belongs to the user's code, and not to a library."""
    name = value.__module__ if isinstance(value, type) else value.__name__
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(name)
    file = getattr(module, "__file__", None) or ""
    is_installed = "site-packages" in file or "dist-packages" in file
    is_known = name.split(".")[0] in (*LIBRARIES, *_WITH_PYTHON, "rhino_jax")
    return not is_installed and not is_known


_AT_MOST = 2_000
"""Maximal number of objects that are searched, to bound the time of a trace."""


def leak_watch(
    fn: Callable[..., Any], statics: Iterable[tuple[str, Any]]
) -> Callable[[str, str], None]:
    """Take a snapshot of everything that a function can reach, before its trace, and
    return the check after it.

    Args:
      fn: the user's function.
      statics: (path, value) of arguments that are no arrays.

    Returns:
      A function of the caller, for messages, and of the function's name, that raises a
      `TraceError` with the first of the places in which the function stored a tracer,
      after restoring the old values.
    """
    held_before: dict[int, tuple[str, Any, dict[Any, Any]]] = {}
    start = (*statics, *reached_by(fn), *_variables(fn)) if is_outermost() else ()
    # Breadth first, so that distant holders are cut off at the limit.
    left = deque(start)
    while left and len(held_before) < _AT_MOST:
        path, value = left.popleft()
        held = None if id(value) in held_before else items(value)
        if held is not None:
            held_before[id(value)] = (path, value, held)
            left.extend(within(path, value, held))

    def check(what: str, name: str) -> None:
        leaks = []
        for path, value, before in held_before.values():
            for key, now in (items(value) or {}).items():
                if before.get(key, NOTHING) is now or not _holds_tracer(now):
                    continue
                restore(value, key, before)
                # The cache of a property is recomputed on the next access.
                kind = getattr(type(value), key, None) if isinstance(key, str) else None
                if not isinstance(kind, functools.cached_property):
                    leaks.append((step(path, value, key), now))
        if not leaks:
            return
        path, now = leaks[0]
        found = jax.tree.leaves(now)
        tracer = next(x for x in found if isinstance(x, jax.core.Tracer))
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

    return check


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
