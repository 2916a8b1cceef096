"""Pallas kernels: how their grid and block specs allow them to be sharded.

An axis of the grid is *parallel* where it moves the blocks of every result along one
dim, one block a step, and those of an operand likewise or not at all; where the kernel
does not query its index on that axis; and where no state is carried from step to step.
Then a part of the grid is the same kernel on a part of the arrays.

An axis that `jax.vmap` added is treated like the others. Scalars that are prefetched
(`num_scalar_prefetch`) are replicated; an axis along which a block's position is read
from them is not parallel.

Other ops with opaque bodies (foreign calls, manually sharded code) are not imported
either, but their FLOPs count, and kernels are identified by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from rhino_jax._compat import in_current_mesh, is_literal, open_jaxpr
from rhino_jax.frontend.regions import body_jaxpr, inner_equations, sub_jaxprs
from rhino_jax.ir.coverage import KERNELS


PALLAS_CALL = "pallas_call"

Moves = tuple[int | None, ...]
"""For every dim of an array, the parallel axis of the grid that moves its blocks, or
None."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid of a kernel, and how it moves over its arrays.

    Attributes:
      sizes: sizes of the grid's axes.
      operands, results: for each array, see `Moves`; prefetched scalars are the first
        operands.
      num_scalars: number of prefetched scalars.
    """

    sizes: tuple[int, ...]
    operands: tuple[Moves, ...]
    results: tuple[Moves, ...]
    num_scalars: int = 0

    @property
    def parallel(self) -> frozenset[int]:
        return frozenset(
            axis for moves in self.results for axis in moves if axis is not None
        )


def grid_of(params: Any) -> Grid | None:
    """Return the grid of a `pallas_call`; None where too little is known of it.

    Args:
      params: parameters of the equation.
    """
    mapping = params["grid_mapping"]
    sizes = tuple(mapping.grid)
    if (
        mapping.num_dynamic_grid_bounds
        or params.get("input_output_aliases")
        or params.get("mesh") is not None
        or not all(isinstance(n, int) for n in sizes)
    ):
        return None
    blocks = list(mapping.block_mappings)
    moves = [_moves(block, sizes) for block in blocks]
    uses = [_axes_used(block) for block in blocks]
    first = mapping.num_inputs
    # The kernel numbers the axes of its own grid, without those that `vmap` added.
    own = [a for a in range(len(sizes)) if a not in mapping.vmapped_dims]
    # Axes of the grid whose index or size the kernel queries.
    asked = {
        own[int(eqn.params["axis"])]
        for eqn in inner_equations(body_jaxpr(params), sub_jaxprs)
        if eqn.primitive.name in ("program_id", "num_programs")
    }
    # Those that the kernel's author declares parallel.
    said = getattr(params.get("compiler_params"), "dimension_semantics", None) or ()
    words = (str(getattr(s, "value", s)).lower() for s in said)
    pairs = zip(own, words, strict=False)
    declared = {axis for axis, word in pairs if word == "parallel"}
    declared.update(mapping.vmapped_dims)
    parallel = {
        axis
        for axis in range(len(sizes))
        if sizes[axis] > 1
        and axis not in asked
        and (not mapping.num_scratch_operands or axis in declared)
        and all(axis in m for m in moves[first:])
        and all(axis in m or axis not in u for m, u in zip(moves, uses, strict=True))
    }
    kept = [tuple(a if a in parallel else None for a in m) for m in moves]
    prefetched = open_jaxpr(body_jaxpr(params)).invars[: mapping.num_index_operands]
    scalars: list[Moves] = [(None,) * len(v.aval.shape) for v in prefetched]
    return Grid(sizes, (*scalars, *kept[:first]), tuple(kept[first:]), len(scalars))


def local_params(params: Any, grid: Grid, pieces: Sequence[int]) -> dict[str, Any]:
    """Return the parameters of the same kernel on a part of the grid.

    Args:
      params: parameters of the equation; the new ones are for the mesh in context.
      grid: its grid.
      pieces: number of shards of each axis of the grid.
    """
    params = everywhere_params(params)
    mapping = params["grid_mapping"]

    def local(aval: Any, moves: Moves) -> Any:
        shape = tuple(
            n if axis is None else n // pieces[axis]
            for n, axis in zip(aval.shape, moves, strict=True)
        )
        return aval.update(shape=shape)

    moved = (*grid.operands[grid.num_scalars :], *grid.results)
    blocks = tuple(
        block.replace(array_aval=local(block.array_aval, moves))
        for block, moves in zip(mapping.block_mappings, moved, strict=True)
    )
    sizes = tuple(n // p for n, p in zip(grid.sizes, pieces, strict=True))
    changed = {
        "grid_mapping": mapping.replace(grid=sizes, block_mappings=blocks),
        "out_avals": tuple(map(local, params["out_avals"], grid.results)),
    }
    estimate = params.get("cost_estimate")
    if dataclasses.is_dataclass(estimate) and not isinstance(estimate, type):
        shares = {
            f.name: value // math.prod(pieces)
            for f in dataclasses.fields(estimate)
            if isinstance(value := getattr(estimate, f.name), int)
        }
        changed["cost_estimate"] = dataclasses.replace(estimate, **shares)
    return {**params, **changed}


def everywhere_params(params: Any) -> dict[str, Any]:
    """Return the parameters of the same kernel, for the mesh in context."""
    mapping = params["grid_mapping"]
    blocks = tuple(
        block.replace(index_map_jaxpr=in_current_mesh(block.index_map_jaxpr))
        for block in mapping.block_mappings
    )
    return {
        **params,
        "grid_mapping": mapping.replace(block_mappings=blocks),
        "jaxpr": in_current_mesh(params["jaxpr"]),
    }


def _moves(block: Any, sizes: Sequence[int]) -> Moves:
    """Return the axis of the grid that moves the block along each dim, one block a
    step."""
    index = open_jaxpr(block.index_map_jaxpr)
    shape = block.array_aval.shape
    if len(index.outvars) != len(shape):
        return (None,) * len(shape)
    place = {var: i for i, var in enumerate(index.invars[: len(sizes)])}
    found: list[int | None] = []
    for out, size, entry in zip(index.outvars, shape, block.block_shape, strict=True):
        axis = None if is_literal(out) else place.get(out)
        length = _block_length(entry)
        if axis is not None and (length is None or sizes[axis] * length != size):
            axis = None
        found.append(axis)
    # An axis that moves along two dims at once moves along a diagonal.
    return tuple(a if a is not None and found.count(a) == 1 else None for a in found)


def _block_length(entry: Any) -> int | None:
    """Return the elements of a dim in one block; None where blocks may overlap or are
    padded."""
    if entry is None or type(entry).__name__ in ("Squeezed", "Mapped"):
        return 1
    if isinstance(entry, int):
        return entry
    if type(entry).__name__ == "Blocked":
        return int(entry.block_size)
    return None


def _axes_used(block: Any) -> frozenset[int]:
    """Return the axes of the grid on which a block's position depends in any way."""
    index = open_jaxpr(block.index_map_jaxpr)
    read = [v for eqn in index.eqns for v in eqn.invars] + list(index.outvars)
    names = {id(v) for v in read if not is_literal(v)}
    return frozenset(i for i, v in enumerate(index.invars) if id(v) in names)


def kernel_name(eqn: Any) -> str | None:
    """Return the name under which a user registers a rule for this kernel; None for
    other ops."""
    named = eqn.params.get(KERNELS.get(eqn.primitive.name))
    return named if named is None or isinstance(named, str) else type(named).__name__


def estimated_flops(eqn: Any) -> float | None:
    """Return the FLOPs that a kernel's author states
    (`pallas_call(cost_estimate=...)`), or None."""
    estimate = eqn.params.get("cost_estimate")
    flops = getattr(estimate, "flops", None)
    return None if flops is None else float(flops)


def runs_of_body(eqn: Any) -> int:
    """Return how often the body runs: once per grid cell, or per shard."""
    if eqn.primitive.name == "pallas_call":
        grid = eqn.params["grid_mapping"].grid
        return math.prod(int(n) for n in grid if isinstance(n, Integral))
    if eqn.primitive.name == "shard_map":
        mesh = eqn.params["mesh"]
        return math.prod(mesh.shape[a] for a in eqn.params["newly_manual_axes"])
    return 1
