"""`shard_map`: code that its user partitioned manually; its layouts and its
collectives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rhino_jax._compat import open_jaxpr
from rhino_jax.frontend.provenance import source_of
from rhino_jax.frontend.regions import (
    body_jaxpr,
    closed_region_jaxprs,
    region_kind,
    sub_jaxprs,
)
from rhino_jax.ir.collectives import OF_PRIMITIVE
from rhino_jax.ir.program import (
    Manual,
    ManualCollective,
    RegionKind,
    Source,
)
from rhino_jax.ir.spec import entry_axes


_UNPRICED = frozenset({"pgather", "ragged_all_to_all", "unreduced_psum"})
"""Primitives whose bytes sent do not follow from shapes."""


def manual_of(eqn: Any, outer: Source) -> Manual | None:
    """Return the manual partitioning of an equation.

    None for all but `shard_map`, and where a spec states more than a layout.

    Args:
      eqn: the equation.
      outer: its source.
    """
    params = eqn.params
    if eqn.primitive.name != "shard_map":
        return None
    mesh = params["mesh"]
    ins, outs = (
        tuple(_layout(spec, len(v.aval.shape)) for spec, v in zip(*side, strict=True))
        for side in (
            (params["in_specs"], eqn.invars),
            (params["out_specs"], eqn.outvars),
        )
    )
    if None in (*ins, *outs):
        return None
    sizes = {str(n): int(s) for n, s in mesh.shape.items()}
    body = body_jaxpr(params)
    sent = [] if body is None else list(_sent(body, sizes, outer, 1))
    known = [c for c in sent if c is not None]
    # Equal collectives of one source line are one that runs as often as all of them.
    runs = Counter[tuple[ManualCollective, Source]]()
    for c in known:
        runs[replace(c, runs=1), c.source] += c.runs
    return Manual(
        ins,
        outs,
        tuple(sizes.items()),
        math.prod(sizes[axis] for axis in params["newly_manual_axes"]),
        tuple(replace(c, runs=count) for (c, _), count in runs.items()),
        is_all_priced=len(known) == len(sent),
    )


def _layout(spec: Any, rank: int) -> Any:
    """Return the mesh axes of each dim of a PartitionSpec; None where the value is
    unreduced."""
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return None
    dims = tuple(map(entry_axes, spec))
    return (*dims, *((),) * (rank - len(dims)))


def _sent(
    jaxpr: Any, sizes: Mapping[str, int], outer: Source, runs: int
) -> Iterator[ManualCollective | None]:
    """Yield the collectives of a body, in order; None for one whose bytes are unknown.

    Args:
      jaxpr: the body, with the shapes of one device.
      sizes: axis name → size, of the mesh.
      outer: the source of the equation that it belongs to.
      runs: how often it runs.
    """
    for eqn in open_jaxpr(jaxpr).eqns:
        name = eqn.primitive.name
        source = source_of(eqn.source_info, outer)
        if name in _UNPRICED:
            yield None
        elif name in OF_PRIMITIVE:
            found = _collective(eqn, sizes, source, runs)
            if found is None or found.axes:
                yield found
        else:
            yield from _sent_inside(eqn, sizes, source, runs)


def _sent_inside(
    eqn: Any, sizes: Mapping[str, int], source: Source, runs: int
) -> Iterator[ManualCollective | None]:
    """Yield the collectives of the bodies of an equation."""
    kind, bodies = region_kind(eqn), closed_region_jaxprs(eqn)
    if kind is None:
        if any(list(_sent(body, sizes, source, 1)) for body in sub_jaxprs(eqn)):
            yield None
        return
    if kind is RegionKind.SCAN:
        runs *= int(eqn.params["length"])
    inside = [list(_sent(body, sizes, source, runs)) for body in bodies]
    if kind is RegionKind.COND:
        # Every device takes one branch: count the one that sends the most.
        yield from max(
            inside,
            key=lambda sent: (
                None in sent,
                sum(c.local_bytes * c.runs for c in sent if c is not None),
            ),
        )
        return
    found = [c for sent in inside for c in sent]
    # The trip count of a `while` loop is unknown here.
    yield from [None] if found and kind is RegionKind.WHILE else found


def _collective(
    eqn: Any, sizes: Mapping[str, int], source: Source, runs: int
) -> ManualCollective | None:
    """Return the collective of an equation, without axes where it sends nothing; None
    where its bytes are unknown."""
    params, kind = eqn.params, OF_PRIMITIVE[eqn.primitive.name]
    said = params.get("axes", params.get("axis_name"))
    names = said if isinstance(said, tuple | list) else (said,)
    if params.get("axis_index_groups") is not None or not set(names) <= set(sizes):
        return None  # over a part of an axis, or over an axis of `vmap`
    moved = eqn.outvars if kind.gathers else eqn.invars
    local_bytes = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in moved)
    axes = tuple(str(n) for n in names if sizes[n] > 1)
    if all(a == b for a, b in params.get("perm", [(0, 1)])):
        axes = ()
    return ManualCollective(kind.name, axes, local_bytes, runs, source)
