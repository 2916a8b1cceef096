"""Run ops batched over leading dims that stand for mesh axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from rhino_jax._compat import bind_eqn
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.passes.deferred_reductions.choice import Split


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
