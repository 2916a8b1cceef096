"""Gathers and scatters on values whose merged dims are split.

Dims of the indices, the batch dims that operands share with them, and dims that every
window takes in full may have any parts. Dims that indices address stay merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhino_jax.frontend.split_dims.forms import (
    DimParts,
    Form,
    Groups,
    Spelled,
    groups_of,
    join,
    places,
)
from rhino_jax.frontend.split_dims.ops import spells


@spells("gather")
def gather(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Split the batch dims of the result like those of the indices, the others like the
    windows'."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = (list(groups_of(v)) for v in eqn.invars)
    made = list(groups_of(eqn.outvars[0]))
    own = _pairs(numbers.start_indices_batching_dims, numbers.operand_batching_dims)
    batch = [d for d in range(len(made)) if d not in numbers.offset_dims]
    for d, out in enumerate(batch):
        seen = [(forms[1], d)] + ([(forms[0], own[d])] if d in own else [])
        indices[d] = made[out] = join(seen)
        if d in own:
            operand[own[d]] = indices[d]
    window = [
        d
        for d in range(len(operand))
        if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    for out, d in zip(sorted(numbers.offset_dims), window, strict=True):
        is_full = operand[d].sizes == (sizes[d],)
        if is_full and d not in numbers.start_index_map:
            operand[d] = made[out] = join([(forms[0], d)])
    read = tuple(operand), tuple(indices)
    slices: list[int] = []
    for d, (size, parts) in enumerate(zip(sizes, operand, strict=True)):
        is_batch = d in numbers.operand_batching_dims
        if parts.is_apart:
            slices += [1] * len(parts.sizes) if is_batch else parts.sizes
        else:
            slices.append(size)
    params = {
        **eqn.params,
        "dimension_numbers": numbers._replace(
            offset_dims=places(tuple(made), numbers.offset_dims),
            collapsed_slice_dims=places(read[0], numbers.collapsed_slice_dims),
            start_index_map=places(read[0], numbers.start_index_map),
            operand_batching_dims=places(read[0], numbers.operand_batching_dims),
            start_indices_batching_dims=places(
                read[1], numbers.start_indices_batching_dims
            ),
        ),
        "slice_sizes": tuple(slices),
    }
    return Spelled(read, (tuple(made),), params)


def _pairs(keys: Sequence[int], values: Sequence[int]) -> dict[int, int]:
    return dict(zip(keys, values, strict=True))


@spells("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max",
        "scatter-sub", "scatter_add", "scatter_mul", "scatter_min", "scatter_max",
        "scatter_sub")  # fmt: skip
def scatter(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled | None:
    """Split the batch dims of the updates like those of the indices, the others like
    the windows'."""
    if len(forms) != 3:
        return None
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = (list(groups_of(v)) for v in eqn.invars)
    own = _pairs(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims)
    batch = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    used: list[DimParts] = []
    for d, u in enumerate(batch):
        seen = [(forms[1], d), (forms[2], u)]
        seen += [(forms[0], own[d])] if d in own else []
        indices[d] = updates[u] = join(seen)
        if d in own:
            operand[own[d]] = indices[d]
        elif indices[d].is_apart:
            used.append(indices[d])
    window = [
        d
        for d in range(len(operand))
        if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]
    for u, d in zip(sorted(numbers.update_window_dims), window, strict=True):
        is_full = operand[d] == updates[u]
        if is_full and d not in numbers.scatter_dims_to_operand_dims:
            operand[d] = updates[u] = join([(forms[0], d), (forms[2], u)])
    read = tuple(operand), tuple(indices), tuple(updates)
    params = {
        **eqn.params,
        "dimension_numbers": numbers._replace(
            update_window_dims=places(read[2], numbers.update_window_dims),
            inserted_window_dims=places(read[0], numbers.inserted_window_dims),
            scatter_dims_to_operand_dims=places(
                read[0], numbers.scatter_dims_to_operand_dims
            ),
            operand_batching_dims=places(read[0], numbers.operand_batching_dims),
            scatter_indices_batching_dims=places(
                read[1], numbers.scatter_indices_batching_dims
            ),
        ),
    }
    return Spelled(read, (read[0],), params, tuple(used))
