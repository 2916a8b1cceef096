"""`shard_map`: code that its user cut by hand, and how."""

from __future__ import annotations

from typing import Any

from rhino_jax._compat import open_jaxpr
from rhino_jax.frontend.regions import body_jaxpr, closed_region_jaxprs
from rhino_jax.ir.program import AxisNames, Manual


_COLLECTIVES = frozenset({
    "all_gather", "all_gather_invariant", "all_to_all", "pgather", "pmax", "pmin",
    "ppermute", "psum", "psum2", "psum_invariant", "ragged_all_to_all",
    "reduce_scatter", "unreduced_psum",
})  # fmt: skip


def manual_of(eqn: Any) -> Manual | None:
    """How an equation's operands and results are cut, where its user says so.

    None of all but `shard_map`, and where a spec says more than a layout.
    """
    params = eqn.params
    if eqn.primitive.name != "shard_map":
        return None
    mesh = params["mesh"]
    sides = (
        (params["in_specs"], eqn.invars),
        (params["out_specs"], eqn.outvars),
    )
    layouts = [
        tuple(_layout(spec, len(v.aval.shape)) for spec, v in zip(*side, strict=True))
        for side in sides
    ]
    if any(layout is None for side in layouts for layout in side):
        return None
    ins, outs = (tuple(x for x in side if x is not None) for side in layouts)
    devices = 1
    for axis in params["newly_manual_axes"]:
        devices *= mesh.shape[axis]
    return Manual(
        ins,
        outs,
        tuple((str(n), int(s)) for n, s in mesh.shape.items()),
        devices,
        _has_collectives(body_jaxpr(params)),
    )


def _layout(spec: Any, rank: int) -> tuple[AxisNames, ...] | None:
    """Axes by dim of a PartitionSpec; None where some value is a partial sum."""
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return None
    dims = [
        () if e is None else e if isinstance(e, tuple) else (e,) for e in tuple(spec)
    ]
    return (*dims, *((),) * (rank - len(dims)))


def _has_collectives(jaxpr: Any) -> bool:
    return jaxpr is not None and any(
        eqn.primitive.name in _COLLECTIVES
        or any(map(_has_collectives, closed_region_jaxprs(eqn)))
        for eqn in open_jaxpr(jaxpr).eqns
    )
