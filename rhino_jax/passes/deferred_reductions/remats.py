"""Recomputed regions (`jax.checkpoint`) with unreduced results."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rhino_jax._compat import bind_eqn, jaxpr_consts, like_jaxpr, open_jaxpr, retrace
from rhino_jax.frontend.regions import closed_region_jaxprs, with_jaxprs
from rhino_jax.ir.program import Op
from rhino_jax.passes.deferred_reductions.values import RegionRunner, UnreducedValue


def run(
    runner: RegionRunner, op: Op, eqn: Any, operands: Sequence[UnreducedValue]
) -> list[UnreducedValue]:
    """Run a recomputed region on reduced values; it may return unreduced ones.

    Args:
      runner: emitter of the program.
      op: the region's op.
      eqn: its equation.
      operands: its operands.
    """
    (body,) = closed_region_jaxprs(eqn)
    inner, consts = open_jaxpr(body), jaxpr_consts(body)
    assert op.call is not None
    (region,) = op.call.regions
    kept = [runner.held_open(v) for v in op.results]
    found: list[tuple[bool, list[int]]] = []

    def inside(*arrays: Any) -> list[Any]:
        values = [
            UnreducedValue(v.aval, x) for v, x in zip(inner.invars, arrays, strict=True)
        ]
        outs = runner.region(region, inner, consts, values)
        found.clear()
        leaving: list[Any] = []
        for value, groups in zip(outs, kept, strict=True):
            if not value.open or not set(value.open) <= set(groups):
                found.append((True, []))
                leaving.append(value.closed())
                continue
            found.append((value.plain is not None, list(value.open)))
            leaving += [] if value.plain is None else [value.plain]
            leaving += value.open.values()
        return leaving

    traced = SimpleNamespace(
        invars=inner.invars, debug_info=inner.debug_info.with_unknown_names()
    )
    new, new_consts = retrace(inside, traced)
    params = with_jaxprs(eqn, [like_jaxpr(body, new, new_consts)])
    arrays = iter(bind_eqn(eqn, [v.closed() for v in operands], params))
    results: list[UnreducedValue] = []
    for var, (has_plain, groups) in zip(eqn.outvars, found, strict=True):
        plain = next(arrays) if has_plain else None
        opened = {g: next(arrays) for g in groups}
        results.append(UnreducedValue(var.aval, plain, opened, maker=eqn))
    return results
