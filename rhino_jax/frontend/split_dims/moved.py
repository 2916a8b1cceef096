"""Ops on values whose merged dims are split, that the factors of the op tell of.

A dim whose indices an op treats alike, or sums over, may have any parts; all operands
then have the same. Dims that it takes a part of, goes along, or addresses by indices
stay merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhino_jax.frontend.split_dims.forms import (
    LANES,
    DimParts,
    Form,
    Groups,
    Spelled,
    places,
)
from rhino_jax.frontend.split_dims.ops import on_factors, spells


@spells("transpose")
def transpose(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Permute dims; the parts of a dim stay together."""
    read, made = on_factors(eqn, forms)
    order = places(read[0], eqn.params["permutation"])
    return Spelled(read, made, {**eqn.params, "permutation": order})


@spells("squeeze", "expand_dims")
def squeeze(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Add or drop dims of size one, which have one part."""
    read, made = on_factors(eqn, forms)
    whole = max(read[0], made[0], key=len)
    dims = sorted(d % len(whole) for d in eqn.params["dimensions"])
    return Spelled(read, made, {**eqn.params, "dimensions": places(whole, dims)})


@spells("slice")
def slice_(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Slice; dims that are not taken in full stay merged."""
    params, (read, made) = eqn.params, on_factors(eqn, forms)
    strides = params["strides"] or (1,) * len(made[0])
    bounds: list[tuple[int, int, int]] = []
    for d, group in enumerate(read[0]):
        if group.is_apart:
            bounds += [(0, part, 1) for part in group.sizes]
        else:
            starts, limits = params["start_indices"], params["limit_indices"]
            bounds.append((starts[d], limits[d], strides[d]))
    starts, limits, steps = zip(*bounds, strict=True) if bounds else ((), (), ())
    params = {**params, "start_indices": starts, "limit_indices": limits}
    if params["strides"] is not None:
        params["strides"] = steps
    return Spelled(read, made, params)


@spells("pad")
def pad(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Pad; dims that are padded stay merged."""
    config, (read, made) = eqn.params["padding_config"], on_factors(eqn, forms)
    paddings = tuple(p for p, g in zip(config, read[0], strict=True) for _ in g.sizes)
    return Spelled(read, made, {**eqn.params, "padding_config": paddings})


@spells("dot_general")
def dot_general(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Give free dims any parts, and contracted and batch dims the parts of both
    sides."""
    read, made = on_factors(eqn, forms, splits_small=False)
    contract, batch = eqn.params["dimension_numbers"]
    numbers = tuple(
        tuple(places(groups, dims) for groups, dims in zip(read, pairs, strict=True))
        for pairs in (contract, batch)
    )
    params = {**eqn.params, "dimension_numbers": numbers}
    used = tuple(read[0][d] for d in contract[0] if read[0][d].is_apart)
    free = [
        [p for d, p in enumerate(groups) if d not in (*contract[side], *batch[side])]
        for side, groups in enumerate(read)
    ]
    cramped = tuple(free[0] + free[1]) if all(map(_is_cramped, free)) else ()
    return Spelled(read, made, params, used, cramped)


def _is_cramped(free: Sequence[DimParts]) -> bool:
    """Whether the dims of one side of a product are too short, once split, for a row of
    `LANES` elements in its result, though they would not be when merged.

    Attention over pixels has two such sides; the side of a weight is never one.
    """
    return any(p.is_apart for p in free) and all(max(p.sizes) < LANES for p in free)


@spells("gather")
def gather(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Split the batch dims of the result like those of the indices, the others like the
    windows'."""
    numbers = eqn.params["dimension_numbers"]
    read, made = on_factors(eqn, forms, merged=numbers.start_index_map)
    slices: list[int] = []
    for d, (size, parts) in enumerate(
        zip(eqn.params["slice_sizes"], read[0], strict=True)
    ):
        is_batch = d in numbers.operand_batching_dims
        if parts.is_apart:
            slices += [1] * len(parts.sizes) if is_batch else parts.sizes
        else:
            slices.append(size)
    numbers = _with_places(
        numbers,
        offset_dims=made[0],
        collapsed_slice_dims=read[0],
        start_index_map=read[0],
        operand_batching_dims=read[0],
        start_indices_batching_dims=read[1],
    )
    params = {**eqn.params, "dimension_numbers": numbers, "slice_sizes": tuple(slices)}
    return Spelled(read, made, params)


def _with_places(numbers: Any, **groups: Groups) -> Any:
    """Return dimension numbers with the positions of the parts of dims for the dims.

    Args:
      numbers: those of a gather or scatter.
      groups: the groups that each of them numbers.
    """
    found = {name: places(g, getattr(numbers, name)) for name, g in groups.items()}
    return numbers._replace(**found)


@spells("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max",
        "scatter-sub", "scatter_add", "scatter_mul", "scatter_min", "scatter_max",
        "scatter_sub")  # fmt: skip
def scatter(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled | None:
    """Split the batch dims of the updates like those of the indices, the others like
    the windows'."""
    if len(forms) != 3:
        return None
    numbers = eqn.params["dimension_numbers"]
    addressed, rank = numbers.scatter_dims_to_operand_dims, len(forms[1].groups)
    # Parts of the indices keep the order of updates, of which the last one may count.
    read, made = on_factors(eqn, forms, merged=addressed, alike={1: range(rank)})
    used = tuple(
        parts
        for d, parts in enumerate(read[1])
        if parts.is_apart and d not in numbers.scatter_indices_batching_dims
    )
    numbers = _with_places(
        numbers,
        update_window_dims=read[2],
        inserted_window_dims=read[0],
        scatter_dims_to_operand_dims=read[0],
        operand_batching_dims=read[0],
        scatter_indices_batching_dims=read[1],
    )
    return Spelled(read, made, {**eqn.params, "dimension_numbers": numbers}, used)
