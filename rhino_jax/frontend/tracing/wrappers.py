"""Wrappers of a function: `jax.jit` and `nnx.jit` are removed, all others stay.

An unknown wrapper may do anything: it is called as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rhino_jax._compat import jit_options, jit_shardings
from rhino_jax.errors import TraceError


Options = dict[str, tuple[Any, ...]]


def take_off(fn: Callable[..., Any]) -> tuple[Callable[..., Any], Options]:
    """Return the function inside `jax.jit` or `nnx.jit`, and the wrapper's options.

    Returns:
      The function, and its `static_argnums`, `static_argnames`, `donate_argnums` and
      `donate_argnames`; without such a wrapper, the function itself and no options.
    """
    if is_nnx_jit(fn):
        return fn.fun, jit_options(fn.jitted_fn)  # type: ignore[attr-defined]
    options = jit_options(fn)
    return (fn.__wrapped__, options) if options else (fn, {})  # type: ignore[attr-defined]


def is_nnx_jit(fn: Any) -> bool:
    """Whether `fn` was made by `nnx.jit`; objects made by `nnx.jit_partial`, which hold
    arguments, do not count."""
    module = sys.modules.get("flax.nnx.transforms.compilation")
    kinds = [getattr(module, name, None) for name in ("JitWrapped", "SimpleJitWrapped")]
    return module is not None and any(type(fn) is kind for kind in kinds)


def check_no_shardings(fn: Any, what: str) -> None:
    """Refuse a function whose `jit` specifies shardings: they would be lost.

    Args:
      fn: the function.
      what: the caller, for messages.

    Raises:
      TraceError: `in_shardings` or `out_shardings` was given.
    """
    if is_nnx_jit(fn):
        name, has_any = "nnx.jit", (fn.in_shardings, fn.out_shardings) != (None, None)
    else:
        name, has_any = "jax.jit", bool(jit_shardings(fn))
    if not has_any:
        return
    raise TraceError(
        f"{what}: `{getattr(fn, '__name__', name)}` is wrapped in a `{name}` that says"
        " shardings, which would be lost: the plan says where arrays lie.",
        where=f"in_shardings= or out_shardings= of `{name}`",
        fix=f"leave them out of `{name}`, and say what must be so by pins=.",
    )
