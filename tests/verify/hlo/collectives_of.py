"""Collectives of a compiled program's text."""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.verify.hlo.collectives.groups import map_mesh
from rhino_jax.verify.hlo.collectives.read import CollectiveReader
from rhino_jax.verify.hlo.module import Module, parse_module
from rhino_jax.verify.hlo.records import CompiledCollective


def read_collectives(
    hlo: str | Module, mesh_axes: Sequence[tuple[str, int]]
) -> tuple[CompiledCollective, ...]:
    module = parse_module(hlo) if isinstance(hlo, str) else hlo
    return CollectiveReader(module, map_mesh(mesh_axes, None)).read_all()
