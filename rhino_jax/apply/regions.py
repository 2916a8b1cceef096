"""Sub-jaxprs of equations, traced again from a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rhino_jax._compat import like_jaxpr, open_jaxpr, retrace


def rebuild_jaxpr(fn: Callable[..., Any], old: Any) -> Any:
    """`fn` as a jaxpr that can stand where `old` stands.

    Args:
      fn: a function of the inputs of `old`, with results of the same types.
      old: a jaxpr from an equation's parameters.
    """
    new, consts = retrace(fn, open_jaxpr(old))
    return like_jaxpr(old, new, consts)
