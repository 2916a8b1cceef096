"""Pickle jaxprs, for another process of the same versions to plan."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core


SHARED = frozenset(
    "jax jaxlib numpy ml_dtypes rhino_jax builtins collections copyreg enum functools"
    " operator _operator".split()
)
"""Packages that another process imports in the same version; not the user's."""


def pickled(x: Any) -> bytes | None:
    """Pickle plain data and jaxprs; None where they contain the user's own objects.

    Python's tracebacks are left out: programs have their own source lines. Same on both
    versions.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5).dump(x)
    except Exception:  # a user's object may raise anything
        return None
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, x: Any) -> Any:
        if type(x).__name__ == "Traceback":
            return type(None), ()
        if type(x).__name__ == "TypedNdArray":  # NumPy's reducer loses its type
            return type(x), (np.asarray(x), x.aval)
        if isinstance(x, jex_core.Primitive):
            return _named, _name_of(x)
        if isinstance(x, jax.sharding.Mesh) and x.size > 1:
            raise pickle.PicklingError("devices of this process")
        if not isinstance(x, type) and not hasattr(x, "__qualname__"):
            return NotImplemented
        if (x.__module__ or "").partition(".")[0] not in SHARED:
            raise pickle.PicklingError(f"{x} is of the user's own code")
        # JAX's own, such as a `custom_jvp`'s rule, which is not called any more.
        is_made = "<locals>" in x.__qualname__
        return (_NotHere, (x.__qualname__,)) if is_made else NotImplemented


class _NotHere:
    """Placeholder of a function that was not pickled."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} was left in another process")


def _name_of(primitive: Any) -> tuple[str, str]:
    """Return the module and the name under which JAX has a primitive."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in ("jax", "rhino_jax"):
            continue
        for name, value in list(vars(module).items()):
            if value is primitive:
                return module_name, name
    raise pickle.PicklingError(f"{primitive} is of the user's own code")


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
