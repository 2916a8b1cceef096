"""Linear solves: `custom_linear_solve` is replaced by a call of its solver.

The primitive has four jaxprs, of which only the solver runs; the others define its
derivative. As a call it is planned like any other, and differentiated as before.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
from jax.core import eval_jaxpr

from rhino_jax._compat import (
    TypedInputs,
    bind_eqn,
    jaxpr_consts,
    open_jaxpr,
    retrace,
    with_eqns,
)
from rhino_jax.frontend.regions import with_bodies


LINEAR_SOLVE = "custom_linear_solve"


def with_open_solves(jaxpr: Any) -> Any:
    """Return the jaxpr with calls of their solvers in place of its linear solves.

    Args:
      jaxpr: closed or not.

    Returns:
      The same object where there are none.
    """
    opened, eqns = open_jaxpr(jaxpr), []
    for eqn in opened.eqns:
        if eqn.primitive.name == LINEAR_SOLVE:
            eqn = _call_of_solver(eqn)
        eqns.append(with_bodies(eqn, with_open_solves))
    if all(map(operator.is_, eqns, opened.eqns)):
        return jaxpr
    return with_eqns(jaxpr, eqns, list(opened.outvars))


def _call_of_solver(eqn: Any) -> Any:
    """Return a `custom_jvp_call` of the solver, with the derivative of the solve."""
    solver, lengths = eqn.params["jaxprs"].solve, eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    consts = slice(first, first + lengths.solve)
    count = sum(lengths)

    @jax.custom_jvp
    def solve(*operands: Any) -> list[Any]:
        given = *operands[consts], *operands[count:]
        return eval_jaxpr(open_jaxpr(solver), jaxpr_consts(solver), *given)

    @solve.defjvp
    def derivative(operands: Any, tangents: Any) -> Any:
        return jax.jvp(lambda *x: bind_eqn(eqn, x, eqn.params), operands, tangents)

    typed = TypedInputs(eqn.invars, eqn.params["jaxprs"].solve.jaxpr.debug_info)
    made, _ = retrace(lambda *x: solve(*x), typed)
    (call,) = made.eqns
    return eqn.replace(primitive=call.primitive, params=call.params)
