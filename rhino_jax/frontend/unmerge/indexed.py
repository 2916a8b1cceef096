"""Gathers and scatters on values whose merged dims are kept apart.

Dims of the indices, and the batch dims that operands share with them, may have any
parts; what is addressed is as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhino_jax.frontend.unmerge.forms import (
    Form,
    Groups,
    Parts,
    Spelled,
    groups_of,
    join,
    places,
)
from rhino_jax.frontend.unmerge.ops import spells


@spells("gather")
def gather(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Batch dims of the result are those of the indices."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices = (list(groups_of(v)) for v in eqn.invars)
    own = dict(
        zip(
            numbers.start_indices_batching_dims,
            numbers.operand_batching_dims,
            strict=True,
        )
    )
    for d in range(len(indices) - 1):
        seen = [(forms[1], d)] + ([(forms[0], own[d])] if d in own else [])
        indices[d] = join(seen)
        if d in own:
            operand[own[d]] = indices[d]
    batch = iter(indices[:-1])
    made = tuple(
        Parts((size,)) if d in numbers.offset_dims else next(batch)
        for d, size in enumerate(eqn.outvars[0].aval.shape)
    )
    read = tuple(operand), tuple(indices)
    params = {
        **eqn.params,
        "dimension_numbers": numbers._replace(
            offset_dims=places(made, numbers.offset_dims),
            collapsed_slice_dims=places(read[0], numbers.collapsed_slice_dims),
            start_index_map=places(read[0], numbers.start_index_map),
            operand_batching_dims=places(read[0], numbers.operand_batching_dims),
            start_indices_batching_dims=places(
                read[1], numbers.start_indices_batching_dims
            ),
        ),
        "slice_sizes": tuple(
            1 if parts.is_apart else size
            for size, parts in zip(eqn.params["slice_sizes"], operand, strict=True)
            for _ in parts.sizes
        ),
    }
    return Spelled(read, (made,), params)


@spells("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max",
        "scatter-sub", "scatter_add", "scatter_mul", "scatter_min", "scatter_max",
        "scatter_sub")  # fmt: skip
def scatter(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled | None:
    """Batch dims of the updates are those of the indices."""
    if len(forms) != 3:
        return None
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = (list(groups_of(v)) for v in eqn.invars)
    own = dict(
        zip(
            numbers.scatter_indices_batching_dims,
            numbers.operand_batching_dims,
            strict=True,
        )
    )
    batch = [d for d in range(len(updates)) if d not in numbers.update_window_dims]
    used: list[Parts] = []
    for d, u in enumerate(batch):
        seen = [(forms[1], d), (forms[2], u)]
        seen += [(forms[0], own[d])] if d in own else []
        indices[d] = updates[u] = join(seen)
        if d in own:
            operand[own[d]] = indices[d]
        elif indices[d].is_apart:
            used.append(indices[d])
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
