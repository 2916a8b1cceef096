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
from rhino_jax.errors import InternalError
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.ir.program import Program


def retraced(closed: Any, fn: Callable[..., list[Any]]) -> Any:
    """The closed jaxpr of `fn`, of the inputs of `closed` and then its constants.

    Arrays that `fn` captures are held inside: see `without_captured`.
    """
    consts = jaxpr_consts(closed)
    new = without_captured(fn, consts_as_inputs(open_jaxpr(closed)))
    return last_as_consts(close_jaxpr(new, ()), consts)


def without_captured(fn: Callable[..., list[Any]], jaxpr: Any, *where: Any) -> Any:
    """The open jaxpr of `fn`, of the inputs of a jaxpr and no constants.

    Arrays that `fn` captures, as of a region whose body is traced once more (the table
    of rotary embeddings in a jitted function), are results of a call that holds them.

    Args:
      fn: the function.
      jaxpr: open, whose inputs it takes.
      where: shapes and axes, as of `retrace`.
    Raises:
      InternalError: the call's arrays are constants of the whole, too.
    """
    new, arrays = retrace(fn, jaxpr, *where)
    if not arrays:
        return new

    def constants() -> list[Any]:
        return list(arrays)

    def run(*inputs: Any) -> list[Any]:
        held = jax.jit(constants)()
        return list(jax.core.eval_jaxpr(new, held, *inputs))

    found, gained = retrace(run, jaxpr, *where)
    if gained:
        raise InternalError(
            "A pass over a program captured arrays that it did not before.",
            where="constants of functions that the program calls",
            numbers=f"shapes {[tuple(x.shape) for x in gained]}",
            fix="pass these arrays as arguments.",
        )
    return found


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
        while_trips=before.while_trips,
    )
