"""A jaxpr made anew by tracing, with the inputs and constants of another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from rhino_jax._compat import (
    close_jaxpr,
    consts_as_inputs,
    jaxpr_consts,
    last_as_consts,
    open_jaxpr,
    retrace,
    without_mesh,
)
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.ir.program import Program


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


def traced_on(fn: Callable[..., list[Any]], types: Iterable[Any]) -> Any:
    """The closed jaxpr of a function of arrays of these types, in no mesh.

    Args:
      fn: the function.
      types: abstract values of JAX, or what has a shape and a dtype like them.
    """
    structs = [
        jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=getattr(t, "weak_type", False))
        for t in types
    ]
    with without_mesh():
        return jax.make_jaxpr(fn)(*structs)


def imported_again(jaxpr: Any, before: Program) -> Program:
    """The program of a jaxpr that has the inputs and outputs of another program."""
    arguments = [e for e in before.inputs if not e.is_const]
    consts = [e for e in before.inputs if e.is_const]
    return import_jaxpr(
        jaxpr,
        name=before.name,
        input_paths=[e.path for e in arguments],
        donated=[e.is_donated for e in arguments],
        captured_paths=[e.path for e in consts],
        output_paths=[e.path for e in before.outputs],
        state_of=[e.state_of for e in before.outputs],
    )
