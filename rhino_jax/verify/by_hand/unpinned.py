"""Strip a user's function of the shardings that its user wrote into it.

`with_sharding_constraint` (and `reshard` on Auto axes) are removed everywhere: in
loops, branches and nested calls. Inner `jax.jit` calls are inlined, since they may have
`in_shardings`. Bodies of `shard_map` stay: their collectives are part of the program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from rhino_jax._compat import (
    bind_eqn,
    jaxpr_consts,
    low_jaxpr,
    open_jaxpr,
)
from rhino_jax.frontend.leaves import split_result
from rhino_jax.frontend.regions import (
    PLAIN_CALLS,
    closed_region_jaxprs,
    evaluate,
    inline_call,
    rebuild_jaxpr,
    with_jaxprs,
)
from rhino_jax.frontend.rules.elementwise import ANNOTATIONS
from rhino_jax.ir.program import Program


def without_constraints(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` without the shardings in it, for tracing only.

    Every array among the arguments must be a tracer.
    """

    @functools.wraps(fn)
    def free(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.core.Tracer)]
        results = []

        def flat(*arrays: Any) -> list[Any]:
            values = list(leaves)
            for i, array in zip(places, arrays, strict=True):
                values[i] = array
            inner_args, inner_kwargs = jax.tree.unflatten(tree, values)
            results.append(split_result(fn(*inner_args, **inner_kwargs)))
            return list(results[-1].arrays)

        flat.__name__ = flat.__qualname__ = getattr(fn, "__name__", "fn")
        tracers = [leaves[i] for i in places]
        closed = low_jaxpr(jax.make_jaxpr(flat)(*tracers))
        opened, consts = open_jaxpr(closed), jaxpr_consts(closed)
        outs = evaluate(opened, consts, tracers, _equation)
        return results[-1].unflatten(outs)

    return free


def _equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in ANNOTATIONS:
        return list(operands)
    if name in PLAIN_CALLS:
        return inline_call(eqn, operands, _equation)
    params = eqn.params
    bodies = closed_region_jaxprs(eqn)
    if bodies:
        params = with_jaxprs(eqn, [rebuild_jaxpr(_body(b), b) for b in bodies])
    return bind_eqn(eqn, operands, params)


def _body(jaxpr: Any) -> Callable[..., list[Any]]:
    inner, consts = open_jaxpr(jaxpr), jaxpr_consts(jaxpr)
    return lambda *args: evaluate(inner, consts, args, _equation)


def sharded_ops(program: Program) -> dict[str, int]:
    """Count the ops of a program that its user sharded by hand, by primitive."""
    found: dict[str, int] = {}
    for op in program.ops:
        if op.name in ANNOTATIONS or op.name == "shard_map":
            found[op.name] = found.get(op.name, 0) + 1
    return found
