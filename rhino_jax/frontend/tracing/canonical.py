"""The canonical form of a jaxpr: one for all traces of a function.

What JAX traces depends on more than the function. Within a mesh, types and parameters
name it. A Python number, or an array that was created from one, has a weak type: a cast
to its own type is then an equation, and none where the type is strong. Differentiation
rules sum over no dims at all, or reshard to no sharding, where a value comes from
outside the mesh in context and its cotangent from inside: `x * (1 + scale)` has a
`reshard` with a mesh and none without. The cotangent of a weak type is converted, and
added to others, late. A plan for one trace would be refused for another, and a pass
would find other equations in it.

In the canonical form all types are strong and name no mesh, and equations that do
nothing are left out. `Traced.out_types` has the weak types of results.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from rhino_jax._compat import (
    context_without_mesh,
    is_literal,
    open_jaxpr,
    scan_counts,
    with_eqns,
    with_type,
)
from rhino_jax.frontend.regions import (
    closed_region_jaxprs,
    region_kind,
    with_bodies,
    with_jaxprs,
)
from rhino_jax.frontend.registry import traits_of
from rhino_jax.frontend.rules.elementwise import ANNOTATIONS, COTANGENT_SUM
from rhino_jax.ir.program import RegionKind
from rhino_jax.ir.traits import OpKind


NO_MESH = AbstractMesh((), ())

_IDENTITIES = frozenset({OpKind.CONVERSION, OpKind.BROADCAST})
"""Kinds of ops that JAX traces to nothing where they change neither shape nor element
type (`forwarding_rules` of jax/_src/lax/lax.py), but only where its type is strong."""


def canonical(jaxpr: Any) -> Any:
    """Return the canonical form of a jaxpr and of its regions; see this module.

    Args:
      jaxpr: closed or not.

    Returns:
      The same object where it is canonical.
    """
    opened, eqns = open_jaxpr(jaxpr), list[Any]()
    known: dict[Any, Any] = {}  # variable → its plain one, or the operand of a no-op

    def read(atom: Any) -> Any:
        return _literal(atom) if is_literal(atom) else known.get(atom, atom)

    def plain(var: Any) -> Any:
        aval = _type(var.aval)
        if aval is not var.aval:
            known[var] = with_type(var, aval)
        return known.get(var, var)

    invars, constvars = (
        [*map(plain, each)] for each in (opened.invars, opened.constvars)
    )
    for eqn in opened.eqns:
        operands = [*map(read, eqn.invars)]
        if _is_noop(eqn):
            known[eqn.outvars[0]] = operands[0]
            continue
        given, results = eqn.outvars, [*map(plain, eqn.outvars)]
        if _differ(operands, eqn.invars) or _differ(results, eqn.outvars):
            eqn = eqn.replace(invars=operands, outvars=results)
        eqn = with_bodies(_plain(eqn), canonical)
        passed = _passed_through(eqn)
        if passed:
            known.update((given[k], eqn.invars[i]) for k, i in passed.items())
            eqn = _without_results(eqn, passed)
        at = len(eqns)
        if eqn.primitive.name == COTANGENT_SUM and given[0].aval.weak_type:
            while at and not any(v in eqns[at - 1].outvars for v in operands):
                at -= 1
        eqns.insert(at, eqn)
    results = [*map(read, opened.outvars)]
    now = invars, constvars, eqns, results
    then = opened.invars, opened.constvars, opened.eqns, opened.outvars
    if not any(map(_differ, now, then)):
        return jaxpr
    return with_eqns(jaxpr, eqns, results, invars=invars, constvars=constvars)


def _passed_through(eqn: Any) -> dict[int, int]:
    """Return the results of a scan that stack what it slices: position → that of the
    operand. JAX stacks weights that the backward loop reads, where their types are
    weak, and reads them themselves where they are strong."""
    if region_kind(eqn) is not RegionKind.SCAN or "num_carry" not in eqn.params:
        return {}
    num_consts, num_carry = scan_counts(eqn.params)
    body = open_jaxpr(eqn.params["jaxpr"])
    at = {v: i for i, v in enumerate(body.invars) if i >= num_consts + num_carry}
    stacked = [*enumerate(body.outvars)][num_carry:]
    return {k: at[v] for k, v in stacked if not is_literal(v) and v in at}


def _without_results(eqn: Any, dropped: Collection[int]) -> Any:
    (body,) = closed_region_jaxprs(eqn)
    outs = (eqn.outvars, open_jaxpr(body).outvars)
    results, inner = (
        [v for k, v in enumerate(each) if k not in dropped] for each in outs
    )
    body = with_eqns(body, open_jaxpr(body).eqns, inner)
    return eqn.replace(outvars=results, params=dict(with_jaxprs(eqn, [body])))


def _differ(new: list[Any], old: Any) -> bool:
    return len(new) != len(old) or any(map(operator.is_not, new, old))


def _type(aval: Any) -> Any:
    """Return the type of an array, strong and without a mesh of Auto axes."""
    if type(aval) is not ShapedArray:
        return aval
    is_empty = aval.sharding.mesh.empty or not _says_nothing(aval.sharding)
    if is_empty and not aval.weak_type:
        return aval
    sharding = {} if is_empty else {"sharding": None}
    return aval.update(weak_type=False, **sharding)


def _literal(atom: Any) -> Any:
    """Return a literal whose value, too, has a strong type and names no mesh."""
    aval = _type(atom.aval)
    is_plain = isinstance(atom.val, np.generic) and aval is atom.aval
    if is_plain or not isinstance(aval, ShapedArray) or aval.shape:
        return atom
    if jnp.issubdtype(aval.dtype, dtypes.extended):
        return atom
    return type(atom)(np.asarray(atom.val, aval.dtype)[()], aval)


def _plain(eqn: Any) -> Any:
    """Return an equation whose parameters and context have no mesh without meaning."""
    if eqn.primitive.name in ANNOTATIONS:
        return eqn
    params = {key: _param(key, value) for key, value in eqn.params.items()}
    if any(params[key] is not value for key, value in eqn.params.items()):
        eqn = eqn.replace(params=params)
    around = eqn.ctx.cur_abstract_mesh
    if around.empty or not _is_auto(around):
        return eqn
    # The bodies of kernels may name the mesh.
    is_kernel = traits_of(eqn.primitive.name).kind is OpKind.KERNEL
    return eqn if is_kernel else eqn.replace(ctx=context_without_mesh(eqn.ctx))


def _param(key: str, value: Any) -> Any:
    if key == "weak_type":
        return False
    if key == "ctx_mesh" and _is_auto(value):
        return NO_MESH
    is_sharding = key.endswith("sharding") and isinstance(value, NamedSharding)
    return None if is_sharding and _says_nothing(value) else value


def _is_noop(eqn: Any) -> bool:
    if "dst_sharding" in eqn.params:
        return _says_nothing(eqn.params["dst_sharding"])
    traits = traits_of(eqn.primitive.name)
    if traits.kind in _IDENTITIES and len(eqn.invars) == 1:
        if not _says_nothing(eqn.params.get("sharding")):
            return False
        before, after = eqn.invars[0].aval, eqn.outvars[0].aval
        return bool(before.shape == after.shape and before.dtype == after.dtype)
    is_reduction = traits.kind is OpKind.REDUCTION and traits.reducer
    return bool(is_reduction and eqn.params.get(traits.dims_param) == ())


@lru_cache
def _says_nothing(sharding: Any) -> bool:
    """Whether a sharding is None, or names no axis and its mesh has only Auto axes."""
    if sharding is None:
        return True
    spec = sharding.spec
    named = [*spec, *getattr(spec, "unreduced", ()), *getattr(spec, "reduced", ())]
    return all(d is None for d in named) and _is_auto(sharding.mesh)


@lru_cache
def _is_auto(mesh: Any) -> bool:
    return all(kind is AxisType.Auto for kind in mesh.axis_types)
