"""Forms: values whose merged dims are split into their parts.

`(2, 4096, 64)` reshaped to `(8192, 64)` has a first dim of two parts, major first: its
groups are `(2 · 4096), (64)`, and split it is an array of shape `(2, 4096, 64)`. A
value of the original program has one part per dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


SMALL = 0.25
"""A value is small relative to another with no more than this share of its elements:
positions of tokens, counts of experts. Costs of small values hardly matter."""

LANES = 128
"""Elements of a row that memory and matrix units process at once on TPU, and pad
shorter rows to. The rows of a product are a free dim of one of its operands, never a
batch dim. Attention over 1,024 tokens in parts of 16 · 64 takes 2.0 times as long as in
8 · 128 or 4 · 256, in 32 · 32 it takes 3.9 times as long (v5e:2x2, XLA's estimates,
libtpu 0.0.52)."""

Origin = tuple[int, int]
"""The place where a dim was merged: the identity of a reshape, and the dim of its
result."""


@dataclass(frozen=True, slots=True)
class DimParts:
    """One dim, as the product of its parts.

    Attributes:
      sizes: sizes of the parts, major first; never empty.
      origins: the places where they were merged.
    """

    sizes: tuple[int, ...]
    origins: frozenset[Origin] = field(default=frozenset(), compare=False)

    @property
    def is_apart(self) -> bool:
        return len(self.sizes) > 1

    @property
    def merged(self) -> DimParts:
        """The dim of the original program."""
        return DimParts((math.prod(self.sizes),)) if self.is_apart else self


Groups = tuple[DimParts, ...]
"""The parts of every dim."""


@dataclass(frozen=True, slots=True)
class Form:
    """The forms in which a value is available.

    Attributes:
      groups: its current groups.
      free: dims that are available in any parts, since nothing is stored in their
        order: those of a broadcast.
    """

    groups: Groups
    free: frozenset[int] = frozenset()

    @property
    def is_apart(self) -> bool:
        return is_apart(self.groups)

    @property
    def elements(self) -> int:
        return math.prod(shape_of(self.groups))


@dataclass(frozen=True, slots=True)
class Spelled:
    """An op on values whose merged dims are split.

    Attributes:
      operands: groups in which each operand is read.
      results: groups of each result.
      params: parameters of the op on split dims.
      used: dims whose parts are used separately here: the reason to split them.
      cramped: dims whose parts make a result of short rows: a reason not to.
      free: dims of the results that are available in any parts.
    """

    operands: tuple[Groups, ...]
    results: tuple[Groups, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    used: tuple[DimParts, ...] = ()
    cramped: tuple[DimParts, ...] = ()
    free: frozenset[int] = frozenset()


def groups_of(atom: Any) -> Groups:
    """Return the groups of a variable of the original program: no dim is split."""
    return tuple(DimParts((int(size),)) for size in getattr(atom.aval, "shape", ()))


def is_apart(groups: Groups) -> bool:
    """Whether some dim has several parts."""
    return any(parts.is_apart for parts in groups)


def merged(groups: Groups) -> Groups:
    """Return the groups of the same value with no dim split."""
    return tuple(parts.merged for parts in groups)


def shape_of(groups: Groups) -> tuple[int, ...]:
    """Return the shape of the array."""
    return tuple(size for parts in groups for size in parts.sizes)


def places(groups: Groups, dims: Iterable[int]) -> tuple[int, ...]:
    """Return the positions of the parts of these dims among the array's dims."""
    ends = list(itertools.accumulate((len(p.sizes) for p in groups), initial=0))
    return tuple(k for d in dims for k in range(ends[d], ends[d + 1]))


def join(seen: Sequence[tuple[Form, int]], *, splits_small: bool = True) -> DimParts:
    """Return the parts of a dim that several operands share.

    They are split only where all stored operands have the same parts.

    Args:
      seen: operands, and which of their dims it is.
      splits_small: whether small operands are reshaped to the parts of others. A
        matmul's are not: they are weights, whose layout is given.
    """
    apart = [form.elements for form, d in seen if form.groups[d].is_apart]
    small = SMALL * max(apart, default=0) if splits_small else 0
    stored = [
        form.groups[d]
        for form, d in seen
        if d not in form.free and (form.groups[d].is_apart or form.elements > small)
    ]
    if len(set(stored)) != 1:
        form, d = seen[0]
        return form.groups[d].merged
    origins = frozenset[Origin]().union(*(parts.origins for parts in stored))
    return DimParts(stored[0].sizes, origins)
