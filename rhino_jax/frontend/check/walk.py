"""A walk over every op of a function, with the arrays that it really runs on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rhino_jax._compat import (
    bind_eqn,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    scan_counts,
)
from rhino_jax.frontend.regions import closed_region_jaxprs, region_kind
from rhino_jax.ir.program import RegionKind


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
    env: dict[Any, Any] = dict(zip(body.invars, args, strict=True))
    env.update(zip(body.constvars, jaxpr_consts(jaxpr), strict=True))
    used = {v for eqn in body.eqns for v in eqn.invars if not is_literal(v)}
    if needs_results:
        used.update(v for v in body.outvars if not is_literal(v))

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in body.eqns:
        operands = [read(v) for v in eqn.invars]
        kind, is_used = region_kind(eqn), not used.isdisjoint(eqn.outvars)
        if kind is RegionKind.CALL:
            inner = closed_region_jaxprs(eqn)[0]
            results = walk(inner, operands, visit, needs_results=is_used)
        else:
            if kind is None:
                visit(eqn, operands)
            else:
                _walk_regions(kind, eqn, operands, visit)
            results = bind_eqn(eqn, operands, eqn.params) if is_used else []
        if is_used:
            env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in body.outvars] if needs_results else []


def _walk_regions(
    kind: RegionKind, eqn: Any, operands: Sequence[Any], visit: Visit
) -> None:
    regions = closed_region_jaxprs(eqn)
    enter = functools.partial(walk, needs_results=False)
    if kind is RegionKind.SCAN:
        num_consts, num_carry = scan_counts(eqn.params)
        split = num_consts + num_carry
        if eqn.params["length"]:
            enter(
                regions[0],
                [*operands[:split], *(x[0] for x in operands[split:])],
                visit,
            )
    elif kind is RegionKind.WHILE:
        cond_consts = eqn.params["cond_nconsts"]
        body_consts = cond_consts + eqn.params["body_nconsts"]
        carries = operands[body_consts:]
        enter(regions[0], [*operands[:cond_consts], *carries], visit)
        enter(regions[1], [*operands[cond_consts:body_consts], *carries], visit)
    elif kind is RegionKind.COND:
        branch = min(max(int(operands[0]), 0), len(regions) - 1)
        enter(regions[branch], operands[1:], visit)
