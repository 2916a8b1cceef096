"""Run ops batched over leading dims that stand for mesh axes; and the choice of sums to
defer, as records and as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from rhino_jax._compat import bind_eqn
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.utils.codec import from_json, to_json


Split = tuple[tuple[int, int], ...]
"""How an op's unreduced sum is divided: (index of a mesh axis of the group, factor that
it shards); per factor, major axis first."""


@dataclass(frozen=True, slots=True)
class DeferredGroup:
    """Values that are unreduced over the same mesh axes.

    Attributes:
      pieces: sizes of the leading dims of unreduced values, one per mesh axis.
      made: op id → how its summed factors are divided; its result is unreduced.
      open: ids of the values that stay unreduced; any other value is reduced when it is
        read.
    """

    pieces: tuple[int, ...]
    made: Mapping[int, Split]
    open: frozenset[int]


def as_text(groups: Iterable[DeferredGroup]) -> str:
    """Return groups as the choice of `defer_reductions`; empty for no groups."""
    said = to_json(tuple(groups))
    return json.dumps(said, sort_keys=True, separators=(",", ":")) if said else ""


def from_text(choice: str) -> Sequence[DeferredGroup]:
    """Parse the groups that `as_text` wrote."""
    return from_json(tuple[DeferredGroup, ...], json.loads(choice or "[]"))


def unsaid(params: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return an equation's parameters without output shardings.

    Returns:
      None where an output sharding partitions a dim.
    """
    said = {k: params[k] for k in ("sharding", "out_sharding") if params.get(k)}
    if any(any(s.spec) for s in said.values()):
        return None
    return {**params, **dict.fromkeys(said)}


def batched(
    eqn: Any, arrays: Sequence[Any], places: Sequence[Sequence[int | None]]
) -> Any:
    """Run an equation of one result, batched over additional dims of its operands.

    Args:
      eqn: the equation.
      arrays: its operands.
      places: for each batched dim, outermost first, its position in each operand, or
        None; positions do not count the batched dims before it.
    Returns:
      The result, with the batched dims leading.
    """
    params = unsaid(eqn.params)
    assert params is not None

    def run(*xs: Any) -> Any:
        return bind_eqn(eqn, xs, params)[0]

    for axes in reversed(places):
        run = jax.vmap(run, in_axes=tuple(axes), out_axes=0)
    return run(*arrays)


def in_pieces(
    eqn: Any, rule: Rule, arrays: Sequence[Any], split: Split, pieces: Sequence[int]
) -> Any:
    """Run an op that sums, and return its unreduced result.

    Args:
      eqn: the op's equation.
      rule: factors of the op.
      arrays: its operands in full.
      split, pieces: see `choice.DeferredGroup`.
    Returns:
      The partial sums, of shape (*pieces, *shape).
    """
    cut: dict[int, list[int]] = {}
    for piece, factor in split:
        cut.setdefault(factor, []).append(piece)
    read, marks = [], []
    for array, layout in zip(arrays, rule.operands, strict=True):
        shape: list[int] = []
        mark: list[int | None] = []
        for size, dim in zip(array.shape, layout, strict=True):
            for piece in cut.get(dim[0], ()) if len(dim) == 1 else ():
                shape.append(pieces[piece])
                mark.append(piece)
                size //= pieces[piece]
            shape.append(size)
            mark.append(None)
        read.append(array if len(shape) == array.ndim else lax.reshape(array, shape))
        marks.append(mark)
    places: list[list[int | None]] = []
    for piece in range(len(pieces)):
        places.append([m.index(piece) if piece in m else None for m in marks])
        for m in marks:
            if piece in m:
                m.remove(piece)
    return batched(eqn, read, places)


def can_split(rule: Rule, split: Split, pieces: Sequence[int]) -> bool:
    """Whether mesh axes divide factors evenly, and these are dims of their own.

    Factors over which a window slides are excluded: partial sums would need a halo.

    Args:
      rule: factors of the op.
      split, pieces: see `choice.DeferredGroup`.
    """
    if any(rule.factors[f].kind is FactorKind.HALO for _, f in split):
        return False
    left = {f: rule.factors[f].size for _, f in split}
    for piece, factor in split:
        if left[factor] % pieces[piece]:
            return False
        left[factor] //= pieces[piece]
    dims = [dim for layout in rule.operands for dim in layout]
    return sorted(p for p, _ in split) == list(range(len(pieces))) and all(
        any(dim == (f,) for dim in dims)
        and all(dim == (f,) or f not in dim for dim in dims)
        for f in left
    )
