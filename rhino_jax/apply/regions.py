"""Equations with sub-jaxprs: the same equation with other sub-jaxprs.

All other parameters (unroll, reverse, policy, the rules of custom derivatives)
stay as they are, so whatever JAX later does with the equation it still does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rhino_jax._compat import like_jaxpr, open_jaxpr, retrace
from rhino_jax.frontend.regions import body_jaxpr, region_kind
from rhino_jax.ir.program import RegionKind


def rebuild_jaxpr(fn: Callable[..., Any], old: Any) -> Any:
    """`fn` as a jaxpr that can stand where `old` stands.

    Args:
      fn: a function of the inputs of `old`, with results of the same types.
      old: a jaxpr from an equation's parameters.
    """
    new, consts = retrace(fn, open_jaxpr(old))
    return like_jaxpr(old, new, consts)


def with_jaxprs(eqn: Any, jaxprs: Sequence[Any]) -> Mapping[str, Any]:
    """The parameters of an equation, with these in place of its sub-jaxprs.

    Args:
      eqn: an equation with regions.
      jaxprs: in the order of `closed_region_jaxprs(eqn)`.
    """
    kind = region_kind(eqn)
    if kind is RegionKind.WHILE:
        return {**eqn.params, "cond_jaxpr": jaxprs[0], "body_jaxpr": jaxprs[1]}
    if kind is RegionKind.COND:
        return {**eqn.params, "branches": tuple(jaxprs)}
    old = body_jaxpr(eqn.params)
    key = next(key for key, value in eqn.params.items() if value is old)
    return {**eqn.params, key: jaxprs[0]}
