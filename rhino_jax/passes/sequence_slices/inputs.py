"""States of a micro-batch's inputs: weights, data with their sequence, constants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rhino_jax._compat import is_literal, jaxpr_consts, open_jaxpr
from rhino_jax.ir.axes import AxisSpan
from rhino_jax.passes.sequence_slices.bounding import (
    MAX_ELEMENTS,
    Masks,
    is_number,
)
from rhino_jax.passes.sequence_slices.bounds import Bounds, exactly, unknown
from rhino_jax.passes.sequence_slices.opened import OpenedProgram
from rhino_jax.passes.sequence_slices.states import WholeSequence
from rhino_jax.passes.staged.apart import Apart


def first_states(
    apart: Apart, piece: OpenedProgram, length: int, masks: Masks
) -> dict[int, WholeSequence]:
    """Return states of the inputs of a micro-batch, by their ids in the program.

    Args:
      apart: the step.
      piece: its micro-batch, calls inlined.
      length: of the sequence, in tokens.
      masks: cache of bounds.
    """
    ids = piece.program.body.inputs
    states = {ids[0]: WholeSequence(is_free=True)}
    known = _bounds(apart.before, apart.captured, masks)
    for i, crossing in enumerate(apart.entering):
        value = ids[1 + i]
        shape = piece.program.values[value].shape
        span = None
        if crossing.how == "sliced":
            dims = [d for d in _dims(apart, i, len(shape)) if shape[d] == length]
            span = AxisSpan(dims[0], length) if len(dims) == 1 else None
        bounds = known[i]
        is_free = 1 + i not in piece.weights or bool(bounds and bounds.is_exact)
        states[value] = WholeSequence(is_free=is_free, span=span, bounds=bounds)
    consts = jaxpr_consts(apart.piece)
    for value, const in zip(ids[len(ids) - len(consts) :], consts, strict=True):
        states[value] = WholeSequence(is_free=True, bounds=_captured(const))
    return states


def lengths_of(apart: Apart) -> list[int]:
    """Return candidates for the length of the sequence, likeliest first.

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
            # Tokens are integers; features come after the sequence.
            score = 2 * np.issubdtype(dtype, np.integer) + (k == 0)
            found[shape[d]] = found.get(shape[d], 0) + int(score)
    best = sorted((s for s in found if s > 1), key=lambda s: (-found[s], -s))
    return [*dict.fromkeys([*best, *(s - 1 for s in best if s > 2)])]


def shapes_of(apart: Apart) -> list[tuple[int, ...]]:
    """Return the shapes of the data, as a micro-batch reads them."""
    avals = [v.aval for v in open_jaxpr(apart.piece).invars[1:]]
    pairs = zip(apart.entering, avals, strict=False)
    return [tuple(aval.shape) for crossing, aval in pairs if crossing.how == "sliced"]


def _dims(apart: Apart, position: int, rank: int) -> Iterator[int]:
    """Yield the dims of an input but those of the batch.

    Args:
      apart: the step.
      position: of the input, which is [.., outer, rows, micro-batches, inner, ..].
      rank: of the input.
    """
    first = apart.entering[position].span.dim
    return (d for d in range(rank) if d not in (first + 1, first + 2))


def _bounds(closed: Any, captured: Sequence[Any], masks: Masks) -> list[Bounds | None]:
    """Return bounds of a program's results for known constants and any other inputs.

    Args:
      closed: the program; constants are its last inputs.
      captured: these constants.
      masks: cache of bounds.
    """
    jaxpr = open_jaxpr(closed)
    of: dict[Any, Bounds | None] = {}
    for v in jaxpr.invars:
        of[v] = unknown(v.aval.dtype, len(v.aval.shape))
    for v, const in (
        *zip(reversed(jaxpr.invars), reversed(captured), strict=False),
        *zip(jaxpr.constvars, jaxpr_consts(closed), strict=True),
    ):
        of[v] = _captured(const)

    def read(v: Any) -> Bounds | None:
        return masks.literal(v.val) if is_literal(v) else of[v]

    for eqn in jaxpr.eqns:
        made = masks.of(eqn, [read(v) for v in eqn.invars])
        of.update(dict.fromkeys(eqn.outvars, made))
    return [read(v) for v in jaxpr.outvars]


def _captured(const: Any) -> Bounds | None:
    """Return the bounds of a constant; None if it is not fully on this machine."""
    dtype = getattr(const, "dtype", np.dtype(object))
    if not is_number(dtype) or not getattr(const, "is_fully_addressable", True):
        return None
    return None if np.size(const) > MAX_ELEMENTS else exactly(const)
