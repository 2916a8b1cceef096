"""Runs of ops on arrays: of every op of a function, as it is met; and of many shards of
one op, in one compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rhino_jax._compat import (
    bind_eqn,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    scan_counts,
)
from rhino_jax.errors import RuleError
from rhino_jax.frontend.regions import (
    closed_region_jaxprs,
    entering,
    evaluate,
    region_kind,
)
from rhino_jax.ir.program import RegionKind


Call = tuple[Sequence[np.ndarray], Mapping[str, Any]]
"""The operands and parameters of one run of a primitive."""

Outcome = list[np.ndarray] | Exception
"""The results of one run, or the exception that it raised."""


def runner_of(
    eqn: Any, args: Sequence[Any], fn: Callable[..., Any] | None
) -> Callable[[Sequence[Call]], list[Outcome]]:
    """Return a function from runs of an equation's primitive to their outcomes, in
    order, with one compilation unless some run fails.

    PRNG keys are passed as their words, in trailing dims.

    Args:
      eqn: the equation.
      args: its operands; those of all runs are of their kinds.
      fn: runs the op on arrays of any size, instead of the primitive; None: the
        primitive runs.
    """
    impls = [jax.random.key_impl(x) if is_key(x) else None for x in args]

    def run(operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
        arrays = [
            jnp.asarray(x) if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(operands, impls, strict=True)
        ]
        if fn is not None:
            results = jax.tree.leaves(fn(*arrays))
        else:
            results = bind_eqn(eqn, arrays, params)
        return [jax.random.key_data(x) if is_key(x) else x for x in results]

    def runner(calls: Sequence[Call]) -> list[Outcome]:
        operands = [list(call[0]) for call in calls]

        def run_all(arrays: list[list[Any]]) -> list[list[Any]]:
            return [run(x, call[1]) for x, call in zip(arrays, calls, strict=True)]

        try:
            return [[*map(np.asarray, each)] for each in jax.jit(run_all)(operands)]
        except Exception as error:
            # Find out which run failed; a user's op may raise any exception.
            if len(calls) == 1:
                return [error]
            return [outcome for call in calls for outcome in runner([call])]

    return runner


def is_key(x: Any) -> bool:
    """Whether an array holds PRNG keys."""
    return bool(jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key))


def as_array(x: Any) -> jax.Array:
    """Return an example argument as an array, with the element type that JAX gives it.

    Raises:
      RuleError: it is no array.
    """
    try:
        return x if isinstance(x, jax.Array) else jnp.asarray(x)
    except TypeError:
        raise RuleError(
            "a rule is checked by running it, and needs arrays.",
            numbers=f"got {type(x).__name__}: {x!r}",
            fix="pass small example arrays, as numpy.ones((8, 4)).",
        ) from None


def to_numpy(x: Any) -> np.ndarray:
    """Return an array, or the words of PRNG keys, as a NumPy array."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


Visit = Callable[[Any, Sequence[Any]], None]
"""A callback with an equation without regions, and its operands."""


def walk(
    jaxpr: Any, args: Sequence[Any], visit: Visit, *, needs_results: bool = True
) -> list[Any]:
    """Run a closed jaxpr, visit every plain op, and return its results.

    Calls are entered. Of a loop the first iteration is visited, of a conditional the
    branch that is taken. Dead ops are visited, but not run.
    """
    body = open_jaxpr(jaxpr)
    used = {v for eqn in body.eqns for v in eqn.invars if not is_literal(v)}
    if needs_results:
        used.update(v for v in body.outvars if not is_literal(v))

    def run(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        kind, is_used = region_kind(eqn), not used.isdisjoint(eqn.outvars)
        if kind is RegionKind.CALL:
            inner = closed_region_jaxprs(eqn)[0]
            return walk(inner, operands, visit, needs_results=is_used)
        if kind is None:
            visit(eqn, operands)
        else:
            enter(kind, eqn, operands)
        unused = [None] * len(eqn.outvars)
        return bind_eqn(eqn, operands, eqn.params) if is_used else unused

    def enter(kind: RegionKind, eqn: Any, operands: Sequence[Any]) -> None:
        regions, consts = closed_region_jaxprs(eqn), entering(eqn, operands)
        rest = operands[sum(map(len, consts)) :]
        if kind is RegionKind.COND:
            branch = min(max(int(operands[0]), 0), len(regions) - 1)
            regions, consts, rest = regions[branch:][:1], consts[:1], ()
        elif kind is RegionKind.SCAN:
            num_carry = scan_counts(eqn.params)[1]
            if not eqn.params["length"]:
                return
            rest = [*rest[:num_carry], *(x[0] for x in rest[num_carry:])]
        for region, own in zip(regions, consts, strict=True):
            walk(region, [*own, *rest], visit, needs_results=False)

    return evaluate(body, jaxpr_consts(jaxpr), args, run)
