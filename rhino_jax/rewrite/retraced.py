"""Retrace a jaxpr: a new jaxpr with the inputs and constants of an existing one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax

from rhino_jax._compat import (
    TypedInputs,
    close_jaxpr,
    consts_as_inputs,
    jaxpr_consts,
    last_as_consts,
    open_jaxpr,
    retrace,
    type_on,
    with_type,
    without_mesh,
)
from rhino_jax.errors import InternalError
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.ir.program import Program


def retraced(
    closed: Any, fn: Callable[..., list[Any]], *, on_host: Collection[int] = ()
) -> Any:
    """Trace `fn` with the inputs and constants of a closed jaxpr.

    Arrays that `fn` captures are embedded in the result: see `without_captured`.

    Args:
      closed: closed jaxpr whose types of inputs and constants are used.
      fn: function of the inputs, followed by the constants.
      on_host: positions of the inputs that are in the host's memory from now on.
    Returns:
      A closed jaxpr with the constants of `closed`.
    """
    consts, typed = jaxpr_consts(closed), consts_as_inputs(open_jaxpr(closed))
    if on_host:
        host = jax.memory.Space.Host
        ins = [
            with_type(v, v.aval.update(memory_space=host)) if i in on_host else v
            for i, v in enumerate(typed.invars)
        ]
        typed = TypedInputs(ins, typed.debug_info)
    new = without_captured(fn, typed)
    return last_as_consts(close_jaxpr(new, ()), consts)


def without_captured(fn: Callable[..., list[Any]], jaxpr: Any, *where: Any) -> Any:
    """Trace `fn` with the inputs of a jaxpr to an open jaxpr without constants.

    Arrays that `fn` captures, for example from a region whose body is retraced (the
    table of rotary embeddings in a jitted function), become results of a nested `jit`
    call that holds them as its constants.

    Args:
      fn: function to trace.
      jaxpr: open jaxpr whose input types `fn` is traced with.
      where: shapes and axes, as for `retrace`.
    Raises:
      InternalError: the arrays are hoisted out of the nested call as constants again.
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
    """Trace a function with arguments of the given types, outside of any mesh.

    Args:
      fn: function to trace.
      types: abstract values of JAX, or objects with a shape and a dtype.
    Returns:
      A closed jaxpr.
    """
    with without_mesh():
        return jax.make_jaxpr(fn)(*map(type_on, types))


def reimported(jaxpr: Any, before: Program) -> Program:
    """Import a rewritten jaxpr with the metadata of the original program.

    Args:
      jaxpr: closed jaxpr with the inputs and outputs of `before`.
      before: program whose name, paths, donation, state and `while` trip counts are
        used.
    """
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
