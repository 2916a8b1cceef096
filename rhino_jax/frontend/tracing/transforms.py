"""Passes over a jaxpr before it is imported, and the record of their changes.

Linear solves: `custom_linear_solve` has four jaxprs, of which only the solver runs; the
others define its derivative. As a call of its solver it is planned like any other, and
differentiated as before.

Predicates: where `vmap` batches the condition of a `while`, JAX lowers the loop to run
while any element holds, and selects, element by element, what a trip changes
(jax/_src/lax/control_flow/loops.py, `_while_lowering`). Written out, the reduction in
every trip is planned and costed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.core import eval_jaxpr

from rhino_jax._compat import (
    TypedInputs,
    at_line_of,
    bind_eqn,
    jaxpr_consts,
    like_jaxpr,
    open_jaxpr,
    retrace,
    without_dead_code,
    without_refs,
)
from rhino_jax.errors import RhinoWarning
from rhino_jax.frontend.regions import (
    closed_region_jaxprs,
    inner_equations,
    rebuild_jaxpr,
    region_jaxprs,
    region_kind,
    with_equations,
    with_jaxprs,
)
from rhino_jax.frontend.split_dims import split_merged_dims
from rhino_jax.frontend.tracing.canonical import canonical
from rhino_jax.frontend.tracing.open_moves import with_open_moves
from rhino_jax.ir.program import RegionKind
from rhino_jax.ir.transform import Transform


_NEW_OBJECTS = frozenset({"canonical form", "dead code"})
"""Passes that return a new jaxpr where they change nothing."""

LINEAR_SOLVE = "custom_linear_solve"


def with_open_solves(jaxpr: Any) -> Any:
    """Return the jaxpr with calls of their solvers in place of its linear solves.

    Args:
      jaxpr: closed or not.

    Returns:
      The same object where there are none.
    """
    return with_equations(
        jaxpr,
        lambda eqn: _call_of_solver(eqn) if eqn.primitive.name == LINEAR_SOLVE else eqn,
    )


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


def with_whole_predicates(jaxpr: Any) -> Any:
    """Return the jaxpr with its batched `while` loops written as JAX lowers them.

    Args:
      jaxpr: closed or not.

    Returns:
      The same object where there are none.
    """

    def change(eqn: Any) -> Any:
        if region_kind(eqn) is not RegionKind.WHILE or eqn.effects:
            return eqn
        is_batched = region_jaxprs(eqn)[0].outvars[0].aval.shape
        return _with_whole_predicate(eqn) if is_batched else eqn

    return with_equations(jaxpr, change)


def _with_whole_predicate(eqn: Any) -> Any:
    """Return a `while` of a scalar condition in place of one that is batched."""
    (cond, body), count = closed_region_jaxprs(eqn), eqn.params["cond_nconsts"]
    first = count + eqn.params["body_nconsts"]

    def holds(*inputs: Any) -> Any:
        (found,) = eval_jaxpr(open_jaxpr(cond), jaxpr_consts(cond), *inputs)
        return found

    def any_holds(*inputs: Any) -> list[Any]:
        with at_line_of(eqn):
            found = holds(*inputs)
            return [lax.reduce_or(found, tuple(range(found.ndim)))]

    def step(*inputs: Any) -> list[Any]:
        old = inputs[first:]
        with at_line_of(eqn):
            is_live = holds(*inputs[:count], *old)
            new = eval_jaxpr(open_jaxpr(body), jaxpr_consts(body), *inputs[count:])
            dims = tuple(range(is_live.ndim))
            live = [lax.broadcast_in_dim(is_live, x.shape, dims) for x in old]
            return [lax.select(*case) for case in zip(live, new, old, strict=True)]

    # The condition's constants are now read in the body, too.
    types = TypedInputs(eqn.invars, open_jaxpr(body).debug_info.with_unknown_names())
    step_jaxpr = like_jaxpr(body, *retrace(step, types))
    jaxprs = rebuild_jaxpr(any_holds, cond), step_jaxpr
    params = {**with_jaxprs(eqn, jaxprs), "body_nconsts": first}
    return eqn.replace(invars=[*eqn.invars[:count], *eqn.invars], params=params)


def transformed(jaxpr: Any, name: str) -> tuple[Any, tuple[Transform, ...]]:
    """Return an equivalent jaxpr that plans better, and the passes that changed it.

    Args:
      jaxpr: closed.
      name: the user's function, for messages.
    """
    passes: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("references as values", without_refs),
        ("linear solves", with_open_solves),
        ("canonical form", canonical),  # of solvers, too
        ("batched predicates", with_whole_predicates),
        ("constant windows, rotations, row numbers", with_open_moves),
        # XLA drops dead code; otherwise it would be planned, costed and reported.
        ("dead code", without_dead_code),
        ("merged dims", lambda found: _unmerged(found, name)),
    )
    done = []
    for what, run in passes:
        before, jaxpr = jaxpr, run(jaxpr)
        if jaxpr is before:
            continue
        # Including the equations of sub-jaxprs.
        old, new = (len([*inner_equations(each)]) for each in (before, jaxpr))
        if what not in _NEW_OBJECTS or old != new:
            done.append(Transform(what, old, new))
    return jaxpr, tuple(done)


def _unmerged(jaxpr: Any, name: str) -> Any:
    """Split merged dims; return the original jaxpr where that fails, since it only
    serves better plans."""
    try:
        return split_merged_dims(jaxpr)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(
            f"`{name}`: its merged dims are planned as they are, since keeping them"
            f" apart failed ({text[:200]}). Please report this.",
            RhinoWarning,
            stacklevel=2,
        )
        return jaxpr
