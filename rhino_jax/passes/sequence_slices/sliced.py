"""A micro-batch whose sequence is cut into slices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rhino_jax._compat import untagged, without_dead_code
from rhino_jax.passes.sequence_slices import refused
from rhino_jax.passes.sequence_slices.analysis import (
    SliceAnalysis,
    fitting,
    lengths_of,
    shapes_of,
)
from rhino_jax.passes.sequence_slices.emit import SliceBounds, SliceEmitter
from rhino_jax.passes.sequence_slices.opened import opened
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.rewrite.retraced import retraced


@dataclass(frozen=True, slots=True, eq=False)
class SlicedBody:
    """A micro-batch that runs slice by slice.

    The forward pass runs slices in order, the backward pass last to first; values that
    a slice reads of others were computed earlier in this order.

    Attributes:
      piece: closed jaxpr of the arguments and results of `Apart.piece`.
      slice_of: for every equation its slice; None of those on inputs alone.
      source: for every equation the position of the one in `Apart.piece` that it is a
        part of.
    """

    piece: Any
    slice_of: tuple[int | None, ...]
    source: tuple[int | None, ...]


def sliced(apart: Apart, lengths: Sequence[int]) -> SlicedBody:
    """Cut the sequence of a micro-batch into slices.

    Args:
      apart: the step.
      lengths: tokens of every slice.
    Raises:
      TokenSliceError: a token needs later ones, it cannot be proved that none does, or
        the lengths do not add up to the sequence. Source: Li et al. 2021 (TeraPipe),
        section 3.2.
    """
    found = _found(apart)
    if sum(lengths) != found.length or any(n < 1 for n in lengths):
        raise refused.lengths_wrong(lengths, found.length)
    bounds = SliceBounds(tuple(accumulate(lengths, initial=0)))
    emitter = SliceEmitter(found, bounds)
    new = without_dead_code(retraced(apart.piece, emitter.run))
    piece, tags = untagged(new)
    pairs = [(None, None) if tag is None else _read(tag) for tag in tags]
    return SlicedBody(piece, tuple(t for t, _ in pairs), tuple(i for _, i in pairs))


def sequence_length(apart: Apart) -> int:
    """Return the number of tokens of the sequence that slices cut.

    Raises:
      TokenSliceError: as `sliced` does.
    """
    return _found(apart).length


@functools.lru_cache(maxsize=2)
def _found(apart: Apart) -> SliceAnalysis:
    """Analyse a micro-batch; cached, as the choice of slices asks several times."""
    lengths = lengths_of(apart)
    if not lengths:
        raise refused.no_sequence(apart, shapes_of(apart))
    return fitting(apart, opened(apart, lengths), lengths)


def _read(tag: str) -> tuple[int | None, int | None]:
    t, i = tag.split(",")
    return int(t) if t else None, int(i)
