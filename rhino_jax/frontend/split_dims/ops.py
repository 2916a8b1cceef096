"""Ops on values whose merged dims are split.

Every function takes a `SplitOp` and returns the op on split dims, with the parameters
that change, or None where the op cannot be expressed on them.

For ops that their factors tell of: a dim whose indices the op treats alike, or sums
over, may have any parts; all operands then have the same. Dims that it takes a part of,
goes along, or addresses by indices stay merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rhino_jax.frontend.importer import rule_of
from rhino_jax.frontend.registry import traits_of
from rhino_jax.frontend.rules.gather import REDUCERS, SUBTRACTING, IndexedDims
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
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.traits import OpKind


@dataclass(frozen=True, slots=True)
class SplitOp:
    """An equation whose op is to run on split dims.

    Attributes:
      eqn: the equation, of a plain op.
      forms: forms of its operands.
      target: groups that the results should have; matters for free dims only.
    """

    eqn: Any
    forms: Sequence[Form]
    target: Groups | None

    @property
    def params(self) -> Any:
        return self.eqn.params

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the operands, then of the results."""
        return [tuple(v.aval.shape) for v in (*self.eqn.invars, *self.eqn.outvars)]

    def groups(
        self,
        merged: Collection[int] = (),
        alike: Mapping[int, Collection[int]] | None = None,
        *,
        splits_small: bool = True,
    ) -> tuple[tuple[Groups, ...], tuple[Groups, ...]]:
        """Return the groups in which the op reads its operands, and those of its
        results.

        Dims whose indices the op treats alike, or sums over, may have any parts. A dim
        of its rule has one factor or none.

        Args:
          merged: dims of the first operand that stay merged.
          alike: position of an operand → dims that may have any parts as well.
          splits_small: see `forms.join`.
        """
        rule = rule_of(self.eqn)[0].rule
        kinds = FactorKind.PARALLEL, FactorKind.REDUCE
        free = {f for f, factor in enumerate(rule.factors) if factor.kind in kinds}
        for i, dims in (alike or {}).items():
            free.update(f for d in dims for f in rule.operands[i][d])
        free -= {f for d in merged for f in rule.operands[0][d]}
        seen: dict[int, list[tuple[Form, int]]] = {}
        for form, layout in zip(self.forms, rule.operands, strict=True):
            for d, dim in enumerate(layout):
                for f in free & set(dim):
                    seen.setdefault(f, []).append((form, d))
        parts = {f: join(at, splits_small=splits_small) for f, at in seen.items()}
        layouts = (*rule.operands, *rule.results)
        found = tuple(
            tuple(
                parts[dim[0]] if dim and dim[0] in parts else DimParts((size,))
                for dim, size in zip(layout, shape, strict=True)
            )
            for layout, shape in zip(layouts, self.shapes, strict=True)
        )
        return found[: len(self.forms)], found[len(self.forms) :]


Speller = Callable[[SplitOp], Spelled | None]

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
    found = speller(SplitOp(eqn, forms, target))
    # JAX's differentiation rules state for some results that they are replicated.
    unsaid = {k: None for k, s in said.items() if s is not None}
    return found and replace(found, params={**eqn.params, **found.params, **unsaid})


@spells("reshape", starts=True)
def reshape(op: SplitOp) -> Spelled | None:
    """Split a reshaped dim into the factors that both shapes have in common."""
    (form,), shape = op.forms, op.shapes[-1]
    if op.params.get("dimensions") is not None or 0 in shape:
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
            origins[d].add((id(op.eqn), d))
        is_one = len(sizes) == 1
        made.append(DimParts(sizes, frozenset() if is_one else frozenset(origins[d])))
    params = {"new_sizes": shape_of(tuple(made))}
    return Spelled((form.groups,), (tuple(made),), params, tuple(used))


def elementwise(op: SplitOp) -> Spelled:
    """Give all operands the same parts; scalars stay, and dims of size one are
    broadcast."""
    wide, shape = [form for form in op.forms if form.groups], op.shapes[-1]
    free = frozenset(range(len(shape))) if wide else frozenset()
    for form in wide:
        free &= form.free | {d for d, p in enumerate(form.groups) if p == _ONE}
    joined: list[DimParts] = []
    for d, size in enumerate(shape):
        seen = [(f, d) for f in wide if f.groups[d] != _ONE]
        if op.target is not None and d in free:
            joined.append(op.target[d])
        else:
            joined.append(join(seen) if seen else DimParts((size,)))
    read = tuple(
        tuple(
            DimParts((1,) * len(parts.sizes)) if mine == _ONE else parts
            for mine, parts in zip(form.groups, joined, strict=False)
        )
        for form in op.forms
    )
    return Spelled(read, (tuple(joined),) * len(op.eqn.outvars), free=free)


@spells("bitcast_convert_type")
def bitcast(op: SplitOp) -> Spelled | None:
    """Treat a bitcast as elementwise, where the width does not change."""
    before, after = op.shapes
    return elementwise(op) if before == after else None


@spells("optimization_barrier")
def barrier(op: SplitOp) -> Spelled:
    """Give every result the parts of its operand."""
    groups = tuple(form.groups for form in op.forms)
    return Spelled(groups, groups)


@spells("broadcast_in_dim", starts=True)
def broadcast_in_dim(op: SplitOp) -> Spelled | None:
    """Keep the parts of the operand; new dims are free, and so are those of a small
    operand, which is reshaped itself."""
    if len(op.forms) != 1:
        return None  # a dynamic shape
    (form,), (operand, shape) = op.forms, op.shapes
    dims = op.params["broadcast_dimensions"]
    is_small = math.prod(operand) <= SMALL * math.prod(shape)
    taken = {d: i for i, d in enumerate(dims) if operand[i] == shape[d]}
    free = frozenset(
        d
        for d in range(len(shape))
        if d not in taken or (is_small and not form.groups[taken[d]].is_apart)
    )
    made = tuple(
        op.target[d]
        if op.target is not None and d in free
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
    params = {"shape": shape_of(made), "broadcast_dimensions": tuple(at)}
    return Spelled((tuple(read),), (made,), params, free=free)


@spells("random_bits", starts=True)
def random_bits(op: SplitOp) -> Spelled | None:
    """Leave all dims free for a single key: bits are numbered in the order of
    elements."""
    if op.shapes[0]:
        return None
    made = groups_of(op.eqn.outvars[0]) if op.target is None else op.target
    return Spelled(
        ((),), (made,), {"shape": shape_of(made)}, free=frozenset(range(len(made)))
    )


@spells("iota", starts=True)
def iota(op: SplitOp) -> Spelled | None:
    """Leave all dims free except the one that is counted."""
    if op.forms:
        return None  # a dynamic shape
    (shape,), along = op.shapes, op.params["dimension"]
    free = frozenset(range(len(shape))) - {along}
    made = tuple(
        op.target[d] if op.target and d in free else DimParts((size,))
        for d, size in enumerate(shape)
    )
    (place,) = places(made, [along])
    params = {"shape": shape_of(made), "dimension": place}
    return Spelled((), (made,), params, free=free)


def along(op: SplitOp) -> Spelled | None:
    """Reduce all parts of a dim together; keep the dims that other ops go along merged,
    and give all others any parts."""
    traits = traits_of(op.eqn.primitive.name)
    name = traits.dims_param
    if name not in op.params or any(not form.groups for form in op.forms):
        return None
    said, rank = op.params[name], len(op.forms[0].groups)
    dims = [d % rank for d in (said if isinstance(said, tuple) else (said,))]
    is_reduced = traits.kind is OpKind.REDUCTION and traits.reducer
    read, made = op.groups(alike={0: dims}) if is_reduced else op.groups(dims)
    used = tuple(read[0][d] for d in sorted(dims) if read[0][d].is_apart)
    at = places(read[0], sorted(dims))
    params = {name: at if isinstance(said, tuple) else at[0]}
    return Spelled(read, made, params, used)


@spells("transpose")
def transpose(op: SplitOp) -> Spelled:
    """Permute dims; the parts of a dim stay together."""
    read, made = op.groups()
    order = places(read[0], op.params["permutation"])
    return Spelled(read, made, {"permutation": order})


@spells("squeeze", "expand_dims")
def squeeze(op: SplitOp) -> Spelled:
    """Add or drop dims of size one, which have one part."""
    read, made = op.groups()
    whole = max(read[0], made[0], key=len)
    dims = sorted(d % len(whole) for d in op.params["dimensions"])
    return Spelled(read, made, {"dimensions": places(whole, dims)})


@spells("slice")
def slice_(op: SplitOp) -> Spelled:
    """Slice; dims that are not taken in full stay merged."""
    read, made = op.groups()
    names = "start_indices", "limit_indices", "strides"
    starts, limits, strides = map(op.params.get, names)
    bounds: list[tuple[int, int, int]] = []
    for d, group in enumerate(read[0]):
        if group.is_apart:
            bounds += [(0, part, 1) for part in group.sizes]
        else:
            bounds.append((starts[d], limits[d], strides[d] if strides else 1))
    columns = tuple(zip(*bounds, strict=True)) or ((),) * 3
    params = dict(zip(names, columns, strict=True))
    return Spelled(read, made, params if strides else params | {"strides": strides})


@spells("pad")
def pad(op: SplitOp) -> Spelled:
    """Pad; dims that are padded stay merged."""
    config, (read, made) = op.params["padding_config"], op.groups()
    paddings = tuple(p for p, g in zip(config, read[0], strict=True) for _ in g.sizes)
    return Spelled(read, made, {"padding_config": paddings})


@spells("dot_general")
def dot_general(op: SplitOp) -> Spelled:
    """Give free dims any parts, and contracted and batch dims the parts of both
    sides."""
    read, made = op.groups(splits_small=False)
    contract, batch = op.params["dimension_numbers"]
    numbers = tuple(
        tuple(places(groups, dims) for groups, dims in zip(read, pairs, strict=True))
        for pairs in (contract, batch)
    )
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
    return Spelled(read, made, {"dimension_numbers": numbers}, used, cramped)


@spells("gather")
def gather(op: SplitOp) -> Spelled:
    """Split the batch dims of the result like those of the indices, the others like the
    windows'."""
    dims = IndexedDims.of(op.params["dimension_numbers"])
    read, made = op.groups(dims.indexed)
    slices: list[int] = []
    for d, (size, parts) in enumerate(
        zip(op.params["slice_sizes"], read[0], strict=True)
    ):
        if parts.is_apart:
            slices += [1] * len(parts.sizes) if d in dims.batch else parts.sizes
        else:
            slices.append(size)
    numbers = _on_parts(op, *read, *made)
    return Spelled(read, made, {**numbers, "slice_sizes": tuple(slices)})


def _on_parts(
    op: SplitOp, operand: Groups, indices: Groups, windows: Groups
) -> dict[str, Any]:
    """Return the dimension numbers of a gather or scatter on split dims, given the
    groups of its arrays."""
    numbers = op.params["dimension_numbers"]
    groups = operand, operand, operand, indices, windows
    found = IndexedDims(*map(places, groups, IndexedDims.of(numbers)))
    return {"dimension_numbers": found.put(numbers)}


@spells("scatter", *SUBTRACTING, *REDUCERS)
def scatter(op: SplitOp) -> Spelled | None:
    """Split the batch dims of the updates like those of the indices, the others like
    the windows'."""
    if len(op.forms) != 3:
        return None
    dims, rank = IndexedDims.of(op.params["dimension_numbers"]), len(op.shapes[1])
    # Parts of the indices keep the order of updates, of which the last one may count.
    read, made = op.groups(dims.indexed, {1: range(rank)})
    used = tuple(
        parts
        for d, parts in enumerate(read[1])
        if parts.is_apart and d not in dims.paired
    )
    return Spelled(read, made, _on_parts(op, *read), used)
