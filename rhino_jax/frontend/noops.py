"""No-op equations, removed before the program is imported.

JAX's differentiation rules sum over no dims at all, or reshard to no sharding, where a
value comes from outside the mesh in context and its cotangent from inside, as with a
closure: `x * (1 + scale)` has a `reshard` with a mesh and none without. The same
function would give two programs, and a plan for one would be refused for the other.
"""

from __future__ import annotations

import operator
from typing import Any

from jax.sharding import AxisType

from rhino_jax._compat import is_literal, open_jaxpr, with_eqns
from rhino_jax.frontend.regions import with_bodies
from rhino_jax.frontend.registry import traits_of
from rhino_jax.ir.traits import OpKind


def without_noops(jaxpr: Any) -> Any:
    """Return the jaxpr, including its sub-jaxprs, without reductions over no dims and
    reshards to no sharding.

    Args:
      jaxpr: closed or not.

    Returns:
      The same object where there are none.
    """
    same: dict[Any, Any] = {}  # result of a removed equation → its operand

    def read(atom: Any) -> Any:
        return atom if is_literal(atom) else same.get(atom, atom)

    opened, eqns = open_jaxpr(jaxpr), []
    for eqn in opened.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if _is_noop(eqn):
            same[eqn.outvars[0]] = operands[0]
            continue
        if any(map(operator.is_not, operands, eqn.invars)):
            eqn = eqn.replace(invars=operands)
        eqns.append(with_bodies(eqn, without_noops))
    if all(map(operator.is_, eqns, opened.eqns)) and not same:
        return jaxpr
    return with_eqns(jaxpr, eqns, [read(atom) for atom in opened.outvars])


def _is_noop(eqn: Any) -> bool:
    if "dst_sharding" in eqn.params:
        return _says_nothing(eqn.params["dst_sharding"])
    traits = traits_of(eqn.primitive.name)
    is_reduction = traits.kind is OpKind.REDUCTION and traits.reducer
    return bool(is_reduction and eqn.params.get(traits.dims_param) == ())


def _says_nothing(sharding: Any) -> bool:
    """Whether a sharding names no axis, and its mesh has only Auto axes."""
    spec = sharding.spec
    named = [*spec, *getattr(spec, "unreduced", ()), *getattr(spec, "reduced", ())]
    types = sharding.mesh.axis_types
    return all(d is None for d in named) and all(t is AxisType.Auto for t in types)
