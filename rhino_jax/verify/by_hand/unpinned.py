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
    eqn_context,
    is_literal,
    jaxpr_consts,
    low_jaxpr,
    open_jaxpr,
)
from rhino_jax.frontend.leaves import split_result
from rhino_jax.frontend.regions import (
    body_jaxpr,
    closed_region_jaxprs,
    rebuild_jaxpr,
    with_jaxprs,
)
from rhino_jax.frontend.rules.elementwise import ANNOTATIONS
from rhino_jax.ir.program import Program


INLINED = frozenset({"jit", "pjit"})


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
        outs = _run(open_jaxpr(closed), jaxpr_consts(closed), tracers)
        return results[-1].unflatten(outs)

    return free


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr without the sharding constraints in it."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        with eqn_context(eqn):
            results = _equation(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in ANNOTATIONS:
        return list(operands)
    if name in INLINED:
        body = body_jaxpr(eqn.params)
        return _run(open_jaxpr(body), jaxpr_consts(body), operands)
    params = eqn.params
    bodies = closed_region_jaxprs(eqn)
    if bodies:
        params = with_jaxprs(eqn, [rebuild_jaxpr(_body(b), b) for b in bodies])
    return bind_eqn(eqn, operands, params)


def _body(jaxpr: Any) -> Callable[..., list[Any]]:
    return lambda *args: _run(open_jaxpr(jaxpr), jaxpr_consts(jaxpr), args)


def sharded_ops(program: Program) -> dict[str, int]:
    """Count the ops of a program that its user sharded by hand, by primitive."""
    found: dict[str, int] = {}
    for op in program.ops:
        if op.name in ANNOTATIONS or op.name == "shard_map":
            found[op.name] = found.get(op.name, 0) + 1
    return found
