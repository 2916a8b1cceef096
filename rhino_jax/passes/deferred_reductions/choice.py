"""Choice of the sums to defer, as records and as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    """Return groups as the choice that `delayed` takes; empty for no groups."""
    said = to_json(tuple(groups))
    return json.dumps(said, sort_keys=True, separators=(",", ":")) if said else ""


def from_text(choice: str) -> Sequence[DeferredGroup]:
    """Parse the groups that `as_text` wrote."""
    return from_json(tuple[DeferredGroup, ...], json.loads(choice or "[]"))
