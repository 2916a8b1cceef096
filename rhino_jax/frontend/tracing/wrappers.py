"""What a function is wrapped in: `jax.jit` and `nnx.jit` are taken off, all else stays.

A wrapper that is not known may do anything: it is called as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rhino_jax._compat import jit_options, jit_shardings
from rhino_jax.errors import TraceError


Options = dict[str, tuple[Any, ...]]


def take_off(fn: Callable[..., Any]) -> tuple[Callable[..., Any], Options]:
    """The function that `jax.jit` or `nnx.jit` was given, and what it was told.

    Returns:
      The function, and its `static_argnums`, `static_argnames`, `donate_argnums`
      and `donate_argnames`; the function itself and nothing where it is not wrapped
      so.
    """
    if is_nnx_jit(fn):
        return fn.fun, jit_options(fn.jitted_fn)  # type: ignore[attr-defined]
    options = jit_options(fn)
    return (fn.__wrapped__, options) if options else (fn, {})  # type: ignore[attr-defined]


def is_nnx_jit(fn: Any) -> bool:
    """Whether `nnx.jit` made it; what `nnx.jit_partial` makes holds objects itself."""
    module = sys.modules.get("flax.nnx.transforms.compilation")
    kinds = [getattr(module, name, None) for name in ("JitWrapped", "SimpleJitWrapped")]
    return module is not None and any(type(fn) is kind for kind in kinds)


def check_no_shardings(fn: Any, what: str) -> None:
    """Refuse a function whose `jit` says shardings: they would be lost.

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
