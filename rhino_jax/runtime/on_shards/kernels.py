"""Run Pallas kernels on shards in `shard_map`, since XLA does not partition them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from rhino_jax._compat import bind_eqn
from rhino_jax.frontend.pallas import (
    PALLAS_CALL,
    Grid,
    Moves,
    everywhere_params,
    grid_of,
    local_params,
)
from rhino_jax.ir.spec import Spec
from rhino_jax.runtime.constraints import spec_on_mesh


Cuts = dict[int, tuple[int, ...]]
"""Grid axis → the mesh axes that shard it, major first."""


def run_on_shards(
    eqn: Any, specs: Sequence[Spec | None], args: Sequence[Any], mesh: Any
) -> list[Any] | None:
    """Run a kernel on every device's shard of its grid.

    Args:
      eqn: the equation.
      specs: specs of operands, then of results.
      args: the operands.
      mesh: a mesh whose axes are all Auto.
    Returns:
      Its results; None where this is no kernel, or XLA can partition it.
    """
    if eqn.primitive.name != PALLAS_CALL or math.prod(mesh.axis_sizes) == 1:
        return None
    grid = grid_of(eqn.params)
    cuts = None if grid is None else cuts_of(grid, specs, mesh.axis_sizes)
    if grid is None or cuts is None:
        # Interpreted kernels are plain ops, which XLA does partition.
        return None if eqn.params.get("interpret") else _everywhere(eqn, args, mesh)
    if not cuts and eqn.params.get("interpret"):
        return None
    pieces = [
        math.prod(mesh.axis_sizes[a] for a in cuts.get(axis, ()))
        for axis in range(len(grid.sizes))
    ]

    def local(*shards: Any) -> list[Any]:
        return bind_eqn(eqn, shards, local_params(eqn.params, grid, pieces))

    def spec_of(moves: Moves, shape: Sequence[int]) -> PartitionSpec:
        spec = tuple(() if a is None else cuts.get(a, ()) for a in moves)
        return spec_on_mesh(spec, shape, mesh)

    shapes = [v.aval.shape for v in eqn.outvars]
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(map(spec_of, grid.operands, [x.shape for x in args])),
        out_specs=list(map(spec_of, grid.results, shapes)),
        check_vma=False,
    )(*args)


def cuts_of(
    grid: Grid, specs: Sequence[Spec | None], sizes: Sequence[int]
) -> Cuts | None:
    """Return how a plan shards the grid: by the specs of the results.

    None where the specs do not determine one sharding of it.
    """
    cuts: Cuts = {}
    results = specs[len(grid.operands) :]
    for moves, spec in zip(grid.results, results, strict=True):
        if spec is None:
            return None
        for axis, by in zip(moves, spec, strict=True):
            if axis is None and by:
                return None
            if axis is not None and cuts.setdefault(axis, by) != by:
                return None
    for axis, by in cuts.items():
        if grid.sizes[axis] % math.prod(sizes[a] for a in by):
            return None
    return {axis: by for axis, by in cuts.items() if by}


def _everywhere(eqn: Any, args: Sequence[Any], mesh: Any) -> list[Any]:
    """Run the whole kernel on every device."""
    return jax.shard_map(
        lambda *whole: bind_eqn(eqn, whole, everywhere_params(eqn.params)),
        mesh=mesh,
        in_specs=(PartitionSpec(),) * len(args),
        out_specs=[PartitionSpec()] * len(eqn.outvars),
        check_vma=False,
    )(*args)
