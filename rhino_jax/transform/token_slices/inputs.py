"""What a micro-batch starts from: weights, data with their sequence, constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rhino_jax._compat import is_literal, jaxpr_consts, open_jaxpr
from rhino_jax.transform.staged.apart import Apart
from rhino_jax.transform.staged.sides import Sides
from rhino_jax.transform.token_slices.bounding import bounds_of
from rhino_jax.transform.token_slices.bounds import Bounds, exactly, unknown
from rhino_jax.transform.token_slices.states import Place, Whole


def first_states(apart: Apart, sides: Sides, length: int) -> dict[int, Whole]:
    """States of the inputs of a micro-batch, by their ids in the program.

    Args:
      apart: the step.
      sides: of its micro-batch.
      length: of the sequence.
    """
    ids = sides.program.body.inputs
    states = {ids[0]: Whole(is_free=True)}
    known = _bounds(apart.before)
    for i, crossing in enumerate(apart.entering):
        value, line = ids[1 + i], sides.lines.inputs[1 + i]
        shape = sides.program.values[value].shape
        place = None
        if crossing.how == "sliced":
            dims = [d for d in _dims(apart, i, len(shape)) if shape[d] == length]
            place = Place(dims[0], 1, 1, 0, length) if len(dims) == 1 else None
        states[value] = Whole(
            is_free=line not in sides.parameters, place=place, bounds=known[i]
        )
    consts = jaxpr_consts(apart.piece)
    for value, const in zip(ids[len(ids) - len(consts) :], consts, strict=True):
        states[value] = Whole(is_free=True, bounds=exactly(const))
    return states


def lengths_of(apart: Apart) -> list[int]:
    """How long the sequence may be, likeliest first.

    Data have their sequence in a dim that is not their batch: tokens and labels of that
    length, or text that has one more token, of which a step takes both.
    """
    found: dict[int, int] = {}
    avals = [v.aval for v in open_jaxpr(apart.piece).invars[1:]]
    for i, crossing in enumerate(apart.entering):
        if crossing.how != "sliced":
            continue
        shape, dtype = avals[i].shape, avals[i].dtype
        dims = list(_dims(apart, i, len(shape)))
        for k, d in enumerate(dims):
            # Tokens are whole numbers; features come after the sequence.
            score = 2 * np.issubdtype(dtype, np.integer) + (k == 0)
            found[shape[d]] = found.get(shape[d], 0) + int(score)
    best = sorted((s for s in found if s > 1), key=lambda s: (-found[s], -s))
    return [*dict.fromkeys([*best, *(s - 1 for s in best if s > 2)])]


def shapes_of(apart: Apart) -> list[tuple[int, ...]]:
    """Of the data, as a piece reads them."""
    avals = [v.aval for v in open_jaxpr(apart.piece).invars[1:]]
    pairs = zip(apart.entering, avals, strict=False)
    return [tuple(aval.shape) for crossing, aval in pairs if crossing.how == "sliced"]


def pieces_dim(apart: Apart, position: int) -> int | None:
    """Of what enters cut, the dim of the pieces, of which one is taken."""
    crossing = apart.entering[position]
    return crossing.dim + 2 if crossing.how == "sliced" else None


def _dims(apart: Apart, position: int, rank: int) -> Iterator[int]:
    """Of what enters as [.., outer, rows, pieces, inner, ..], dims but the batch."""
    first = apart.entering[position].dim
    return (d for d in range(rank) if d not in (first + 1, first + 2))


def _bounds(closed: Any) -> list[Bounds | None]:
    """Of what a program makes of constants, whatever its inputs."""
    jaxpr = open_jaxpr(closed)
    of: dict[Any, Bounds | None] = {}
    for v in jaxpr.invars:
        of[v] = unknown(v.aval.dtype, len(v.aval.shape)) if _is_array(v) else None
    for v, const in zip(jaxpr.constvars, jaxpr_consts(closed), strict=True):
        of[v] = exactly(const) if _is_array(v) else None

    def read(v: Any) -> Bounds | None:
        return exactly(v.val) if is_literal(v) else of[v]

    for eqn in jaxpr.eqns:
        made = bounds_of(eqn, [read(v) for v in eqn.invars])
        of.update(dict.fromkeys(eqn.outvars, made))
    return [read(v) for v in jaxpr.outvars]


def _is_array(v: Any) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    return dtype is not None and not str(dtype).startswith("key<")
