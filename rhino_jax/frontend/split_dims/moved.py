"""Ops that move, drop or contract dims, on values whose merged dims are split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhino_jax.frontend.split_dims.forms import (
    LANES,
    DimParts,
    Form,
    Groups,
    Spelled,
    groups_of,
    join,
    places,
)
from rhino_jax.frontend.split_dims.ops import array_shape, spells


@spells("transpose")
def transpose(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Permute dims; the parts of a dim stay together."""
    (form,), order = forms, eqn.params["permutation"]
    made = tuple(form.groups[d] for d in order)
    params = {**eqn.params, "permutation": places(form.groups, order)}
    return Spelled((form.groups,), (made,), params)


@spells("squeeze", "expand_dims")
def squeeze(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Add or drop dims of size one, which have one part."""
    (form,), shape = forms, array_shape(eqn.outvars[0])
    rank = max(len(form.groups), len(shape))
    dims = {d % rank for d in eqn.params["dimensions"]}
    is_squeeze = len(shape) < len(form.groups)
    rest = iter(form.groups)
    made = (
        tuple(g for d, g in enumerate(form.groups) if d not in dims)
        if is_squeeze
        else tuple(DimParts((1,)) if d in dims else next(rest) for d in range(rank))
    )
    whole = form.groups if is_squeeze else made
    params = {**eqn.params, "dimensions": places(whole, sorted(dims))}
    return Spelled((form.groups,), (made,), params)


@spells("slice")
def slice_(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Slice; dims that are not taken in full stay merged."""
    (form,), params = forms, eqn.params
    shape, sizes = array_shape(eqn.invars[0]), array_shape(eqn.outvars[0])
    strides = params["strides"] or (1,) * len(shape)
    is_full = [size == left for size, left in zip(shape, sizes, strict=True)]
    bounds: list[tuple[int, int, int]] = []
    for d, (group, full) in enumerate(zip(form.groups, is_full, strict=True)):
        bounds += (
            [(0, part, 1) for part in group.sizes]
            if full
            else [(params["start_indices"][d], params["limit_indices"][d], strides[d])]
        )
    starts, limits, steps = zip(*bounds, strict=True) if bounds else ((), (), ())
    return Spelled(
        (_partly(form.groups, shape, is_full),),
        (_partly(form.groups, sizes, is_full),),
        {
            **params,
            "start_indices": starts,
            "limit_indices": limits,
            "strides": None if params["strides"] is None else steps,
        },
    )


@spells("pad")
def pad(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Pad; dims that are padded stay merged."""
    form, config = forms[0], eqn.params["padding_config"]
    shape, sizes = array_shape(eqn.invars[0]), array_shape(eqn.outvars[0])
    kept = [tuple(padding) == (0, 0, 0) for padding in config]
    read = _partly(form.groups, shape, kept)
    paddings = tuple(p for p, g in zip(config, read, strict=True) for _ in g.sizes)
    return Spelled(
        (read, ()),
        (_partly(form.groups, sizes, kept),),
        {**eqn.params, "padding_config": paddings},
    )


def _partly(groups: Groups, shape: Sequence[int], kept: Sequence[bool]) -> Groups:
    return tuple(
        group if keep else DimParts((size,))
        for group, size, keep in zip(groups, shape, kept, strict=True)
    )


@spells("dot_general")
def dot_general(
    eqn: Any, forms: Sequence[Form], target: Groups | None
) -> Spelled | None:
    """Give free dims any parts, and contracted and batch dims the parts of both
    sides."""
    sides = [list(groups_of(atom)) for atom in eqn.invars]
    contract, batch = eqn.params["dimension_numbers"]
    used: list[DimParts] = []
    for pairs, is_contracted in ((contract, True), (batch, False)):
        for i, j in zip(*pairs, strict=True):
            both = join([(forms[0], i), (forms[1], j)], splits_small=False)
            sides[0][i] = sides[1][j] = both
            if is_contracted and both.is_apart:
                used.append(both)
    free: list[list[DimParts]] = [[], []]
    for side, form in enumerate(forms):
        for d, group in enumerate(form.groups):
            if d not in contract[side] and d not in batch[side]:
                sides[side][d] = group
                free[side].append(group)
    made = (*(sides[0][i] for i in batch[0]), *free[0], *free[1])
    read = tuple(map(tuple, sides))
    numbers = tuple(
        tuple(places(groups, dims) for groups, dims in zip(read, pairs, strict=True))
        for pairs in (contract, batch)
    )
    params = {**eqn.params, "dimension_numbers": numbers}
    cramped = tuple(free[0] + free[1]) if all(map(_is_cramped, free)) else ()
    return Spelled(read, (made,), params, tuple(used), cramped)


def _is_cramped(free: Sequence[DimParts]) -> bool:
    """Whether the dims of one side of a product are too short, once split, for a row of
    `LANES` elements in its result, though they would not be when merged.

    Attention over pixels has two such sides; the side of a weight is never one.
    """
    return any(p.is_apart for p in free) and all(max(p.sizes) < LANES for p in free)
