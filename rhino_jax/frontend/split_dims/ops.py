"""Ops on values whose merged dims are split.

Every function takes an equation, the forms of its operands, and, for results with free
dims, the groups that they should have; it returns the op on split dims, or None where
the op cannot be expressed on them.

For ops that their factors tell of: a dim whose indices the op treats alike, or sums
over, may have any parts; all operands then have the same. Dims that it takes a part of,
goes along, or addresses by indices stay merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rhino_jax.frontend.importer import rule_of
from rhino_jax.frontend.registry import traits_of
from rhino_jax.frontend.rules.reshape import reshape_rule
from rhino_jax.frontend.split_dims.forms import (
    LANES,
    SMALL,
    DimParts,
    Form,
    Groups,
    Origin,
    Spelled,
    groups_of,
    join,
    places,
    shape_of,
)
from rhino_jax.ir.factor import FactorKind, Layout
from rhino_jax.ir.traits import OpKind


Speller = Callable[[Any, Sequence[Form], Groups | None], Spelled | None]

_SPELLERS: dict[str, Speller] = {}

_STARTS: set[str] = set()
"""Ops at which dims become split, or free."""


def spells(*names: str, starts: bool = False) -> Callable[[Speller], Speller]:
    """Return a decorator that registers a function for these primitives."""

    def register(speller: Speller) -> Speller:
        _SPELLERS.update(dict.fromkeys(names, speller))
        _STARTS.update(names if starts else ())
        return speller

    return register


_ONE = DimParts((1,))


def _speller(name: str) -> Speller | None:
    """Return the function of a primitive, or of what its traits say that it is."""
    if name in _SPELLERS:
        return _SPELLERS[name]
    traits = traits_of(name)
    is_passing = traits.kind is OpKind.IDENTITY and not traits.states_placement
    if traits.is_elementwise or is_passing:
        return elementwise
    return along if traits.dims_param else None


def spell(
    eqn: Any, forms: Sequence[Form], target: Groups | None = None
) -> Spelled | None:
    """Return an equation's op on split dims.

    Args:
      eqn: the equation, of a plain op.
      forms: forms of its operands.
      target: groups that the results should have; matters for free dims only.

    Returns:
      The op on split dims; None where it stays as it is, with its operands merged.
    """
    name = eqn.primitive.name
    if name not in _STARTS and not any(f.is_apart or f.free for f in forms):
        return None
    speller = _speller(name)
    said = {k: eqn.params.get(k) for k in ("sharding", "out_sharding")}
    if speller is None or any(s is not None and any(s.spec) for s in said.values()):
        return None
    found = speller(eqn, forms, target)
    if found is None or not any(said.values()):
        return found
    # JAX's differentiation rules state for some results that they are replicated.
    unsaid = {k: None for k, s in said.items() if s is not None}
    return replace(found, params={**found.params, **unsaid})


def array_shape(atom: Any) -> tuple[int, ...]:
    """Return the shape of an equation's operand or result."""
    return tuple(atom.aval.shape)


@spells("reshape", starts=True)
def reshape(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled | None:
    """Split a reshaped dim into the factors that both shapes have in common."""
    (form,), shape = forms, array_shape(eqn.outvars[0])
    if eqn.params.get("dimensions") is not None or 0 in shape:
        return None
    rule = reshape_rule(shape_of(form.groups), shape)
    if any(f.kind is FactorKind.WHOLE for f in rule.factors):
        return None
    homes = {f: d for d, dim in enumerate(rule.results[0]) for f in dim}
    origins: dict[int, set[Origin]] = {d: set() for d in range(len(shape))}
    sources: dict[int, set[int]] = {d: set() for d in range(len(shape))}
    used: list[DimParts] = []
    for d, parts in enumerate(form.groups):
        factors = [f for k in places(form.groups, [d]) for f in rule.operands[0][k]]
        goes = {homes[f] for f in factors}
        if parts.is_apart and len(goes) > 1:
            used.append(parts)
        for home in goes:
            origins[home] |= parts.origins
            sources[home].add(d)
    made: list[DimParts] = []
    for d, dim in enumerate(rule.results[0]):
        sizes = tuple(rule.factors[f].size for f in dim) or (shape[d],)
        if len(sources[d]) > 1:
            origins[d].add((id(eqn), d))
        is_one = len(sizes) == 1
        made.append(DimParts(sizes, frozenset() if is_one else frozenset(origins[d])))
    params = {**eqn.params, "new_sizes": shape_of(tuple(made))}
    return Spelled((form.groups,), (tuple(made),), params, tuple(used))


def elementwise(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Give all operands the same parts; scalars stay, and dims of size one are
    broadcast."""
    wide = [form for form in forms if form.groups]
    free = frozenset(range(len(array_shape(eqn.outvars[0])))) if wide else frozenset()
    for form in wide:
        free &= form.free | {d for d, p in enumerate(form.groups) if p == _ONE}
    joined: list[DimParts] = []
    for d, size in enumerate(array_shape(eqn.outvars[0])):
        seen = [(f, d) for f in wide if f.groups[d] != _ONE]
        if target is not None and d in free:
            joined.append(target[d])
        else:
            joined.append(join(seen) if seen else DimParts((size,)))
    read = tuple(
        tuple(
            DimParts((1,) * len(parts.sizes)) if mine == _ONE else parts
            for mine, parts in zip(form.groups, joined, strict=False)
        )
        for form in forms
    )
    made = (tuple(joined),) * len(eqn.outvars)
    return Spelled(read, made, eqn.params, free=free)


@spells("bitcast_convert_type")
def bitcast(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled | None:
    """Treat a bitcast as elementwise, where the width does not change."""
    is_same = array_shape(eqn.invars[0]) == array_shape(eqn.outvars[0])
    return elementwise(eqn, forms, target) if is_same else None


@spells("optimization_barrier")
def barrier(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled:
    """Give every result the parts of its operand."""
    groups = tuple(form.groups for form in forms)
    return Spelled(groups, groups, eqn.params)


@spells("broadcast_in_dim", starts=True)
def broadcast_in_dim(
    eqn: Any, forms: Sequence[Form], target: Groups | None
) -> Spelled | None:
    """Keep the parts of the operand; new dims are free, and so are those of a small
    operand, which is reshaped itself."""
    if len(forms) != 1:
        return None  # a dynamic shape
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    (form,), operand = forms, array_shape(eqn.invars[0])
    is_small = math.prod(operand) <= SMALL * math.prod(shape)
    taken = {d: i for i, d in enumerate(dims) if operand[i] == shape[d]}
    free = frozenset(
        d
        for d in range(len(shape))
        if d not in taken or (is_small and not form.groups[taken[d]].is_apart)
    )
    made = tuple(
        target[d]
        if target is not None and d in free
        else form.groups[taken[d]]
        if d in taken
        else DimParts((size,))
        for d, size in enumerate(shape)
    )
    read = list(form.groups)
    for d, i in taken.items():
        read[i] = made[d]
    at: list[int] = []
    for i, d in enumerate(dims):
        there = places(made, [d])
        at += there if taken.get(d) == i else there[:1]
    params = {
        **eqn.params,
        "shape": shape_of(made),
        "broadcast_dimensions": tuple(at),
    }
    return Spelled((tuple(read),), (made,), params, free=free)


@spells("random_bits", starts=True)
def random_bits(
    eqn: Any, forms: Sequence[Form], target: Groups | None
) -> Spelled | None:
    """Leave all dims free for a single key: bits are numbered in the order of
    elements."""
    if array_shape(eqn.invars[0]):
        return None
    made = groups_of(eqn.outvars[0]) if target is None else target
    params = {**eqn.params, "shape": shape_of(made)}
    return Spelled(((),), (made,), params, free=frozenset(range(len(made))))


@spells("iota", starts=True)
def iota(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled | None:
    """Leave all dims free except the one that is counted."""
    if forms:
        return None  # a dynamic shape
    shape, along = eqn.params["shape"], eqn.params["dimension"]
    free = frozenset(range(len(shape))) - {along}
    made = tuple(
        target[d] if target and d in free else DimParts((size,))
        for d, size in enumerate(shape)
    )
    (place,) = places(made, [along])
    params = {**eqn.params, "shape": shape_of(made), "dimension": place}
    return Spelled((), (made,), params, free=free)


def on_factors(
    eqn: Any,
    forms: Sequence[Form],
    merged: Collection[int] = (),
    alike: Mapping[int, Collection[int]] | None = None,
    *,
    splits_small: bool = True,
) -> tuple[tuple[Groups, ...], tuple[Groups, ...]]:
    """Return the groups in which an op reads its operands, and those of its results.

    Dims whose indices the op treats alike, or sums over, may have any parts.

    Args:
      eqn: the equation; a dim of its rule has one factor or none.
      forms: forms of its operands.
      merged: dims of the first operand that stay merged.
      alike: position of an operand → dims that may have any parts as well.
      splits_small: see `forms.join`.
    """
    rule = rule_of(eqn)[0].rule
    kinds = FactorKind.PARALLEL, FactorKind.REDUCE
    free = {f for f, factor in enumerate(rule.factors) if factor.kind in kinds}
    free |= {
        f
        for i, dims in (alike or {}).items()
        for d in dims
        for f in rule.operands[i][d]
    }
    free -= {f for d in merged for f in rule.operands[0][d]}
    seen: dict[int, list[tuple[Form, int]]] = {}
    for form, layout in zip(forms, rule.operands, strict=True):
        for d, dim in enumerate(layout):
            for f in free & set(dim):
                seen.setdefault(f, []).append((form, d))
    parts = {f: join(at, splits_small=splits_small) for f, at in seen.items()}

    def groups(atom: Any, layout: Layout) -> Groups:
        return tuple(
            parts[dim[0]] if dim and dim[0] in parts else DimParts((size,))
            for dim, size in zip(layout, array_shape(atom), strict=True)
        )

    return (
        tuple(map(groups, eqn.invars, rule.operands)),
        tuple(map(groups, eqn.outvars, rule.results)),
    )


def along(eqn: Any, forms: Sequence[Form], target: Groups | None) -> Spelled | None:
    """Reduce all parts of a dim together; keep the dims that other ops go along merged,
    and give all others any parts."""
    traits = traits_of(eqn.primitive.name)
    name = traits.dims_param
    if name not in eqn.params or any(not form.groups for form in forms):
        return None
    said, rank = eqn.params[name], len(forms[0].groups)
    dims = [d % rank for d in (said if isinstance(said, tuple) else (said,))]
    is_reduced = traits.kind is OpKind.REDUCTION and traits.reducer
    read, made = (
        on_factors(eqn, forms, alike={0: dims})
        if is_reduced
        else on_factors(eqn, forms, merged=dims)
    )
    used = tuple(read[0][d] for d in sorted(dims) if read[0][d].is_apart)
    at = places(read[0], sorted(dims))
    params = {**eqn.params, name: at if isinstance(said, tuple) else at[0]}
    return Spelled(read, made, params, used)


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
    # Both sides are too short, once split, for a row of `LANES` elements in the result,
    # though they would not be when merged: attention over pixels has two such sides;
    # the side of a weight is never one.
    is_cramped = all(
        any(p.is_apart for p in dims) and all(max(p.sizes) < LANES for p in dims)
        for dims in free
    )
    cramped = tuple(free[0] + free[1]) if is_cramped else ()
    return Spelled(read, made, params, used, cramped)


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
