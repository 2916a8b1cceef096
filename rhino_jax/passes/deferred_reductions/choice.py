"""The choice of values that stay unreduced, as records and as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    found = to_json(tuple(groups))
    return json.dumps(found, sort_keys=True, separators=(",", ":")) if found else ""


def from_text(choice: str) -> Sequence[DeferredGroup]:
    """Parse the groups that `as_text` wrote."""
    return from_json(tuple[DeferredGroup, ...], json.loads(choice or "[]"))


def can_split(rule: Rule, split: Split, pieces: Sequence[int]) -> bool:
    """Whether mesh axes divide factors evenly, and these are dims of their own.

    Partial sums over factors that a window slides over would need a halo.
    """
    left = {f: rule.factors[f].size for _, f in split}
    for piece, f in split:
        if rule.factors[f].kind is FactorKind.HALO or left[f] % pieces[piece]:
            return False
        left[f] //= pieces[piece]
    dims = {dim for layout in rule.operands for dim in layout}
    return sorted(p for p, _ in split) == list(range(len(pieces))) and all(
        (f,) in dims and all(dim == (f,) or f not in dim for dim in dims) for f in left
    )
