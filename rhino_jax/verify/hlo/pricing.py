"""Estimate the seconds of a plan's collectives on the hardware that is compiled for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from rhino_jax.cost.collectives import collective_s, wire_bytes
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.mesh import size_of
from rhino_jax.hardware.target import Target
from rhino_jax.plan.records import Collective


AnyCollective = TypeVar("AnyCollective", bound=Collective)


def priced(
    collectives: Iterable[AnyCollective],
    mesh_axes: Sequence[tuple[str, int]],
    target: Target,
) -> tuple[AnyCollective, ...]:
    """Return collectives with their estimated seconds on a target.

    A plan for a TPU that is compiled for emulated CPU devices is compared in CPU
    seconds.

    Args:
      collectives: records with bytes on the wire.
      mesh_axes: (name, size) of the mesh that they run over, major first.
      target: the hardware.
    """
    mesh = lay_out(target, mesh_axes)
    place = {name: i for i, name in enumerate(mesh.names)}
    found = []
    for c in collectives:
        axes = [place[name] for name in c.axes]
        share = wire_bytes(c.kind, 1.0, size_of(mesh, axes))
        if not share or not c.count:
            found.append(replace(c, seconds=0.0))
            continue
        local_bytes = c.bytes / c.count / share
        one_s = collective_s(c.kind, local_bytes, mesh.over(axes))
        found.append(replace(c, seconds=one_s * c.count))
    return tuple(found)
