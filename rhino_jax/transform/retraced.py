"""A jaxpr made anew by tracing, with the inputs and constants of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rhino_jax._compat import (
    close_jaxpr,
    consts_as_inputs,
    jaxpr_consts,
    last_as_consts,
    open_jaxpr,
    retrace,
)


def retraced(closed: Any, fn: Callable[..., list[Any]]) -> Any:
    """The closed jaxpr of `fn`, of the inputs of `closed` and then its constants.

    Raises:
      AssertionError: `fn` captures arrays; what it needs must be traced (`lax.full`,
        `lax.iota`) or be a NumPy scalar, so that inputs stay as they are.
    """
    consts = jaxpr_consts(closed)
    opened = consts_as_inputs(open_jaxpr(closed))
    new, gained = retrace(fn, opened)
    assert not gained, f"constants were added: {[g.shape for g in gained]}"
    return last_as_consts(close_jaxpr(new, ()), consts)
