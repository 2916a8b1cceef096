"""Equations after the micro-batches, by submesh: updates, and what couples them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rhino_jax.rewrite.flat import FlatRegion


LIGHT_BYTES = 4096
"""Largest size, in bytes, of values that every reader computes for itself.

Their operands are exchanged first; larger values are computed where most of their
operands are.
"""


@dataclass(frozen=True, slots=True)
class StepSend:
    """A value that one submesh computes and another one reads, once a step.

    Attributes:
      value: its id.
      source, target: submeshes.
      round: round of the source's updates after which it is available; -1: before all
        of them.
    """

    value: int
    source: int
    target: int
    round: int


@dataclass(slots=True)
class After:
    """Equations after the loop, by submesh and round.

    In a round a submesh runs all equations that need nothing of other submeshes beyond
    what these sent after earlier rounds. Without clipping by a global norm, say, one
    round suffices.

    Attributes:
      region: equations of the program after the loop; its inputs are the step's inputs,
        then the accumulated outputs of all micro-batches.
      homes: value → the submesh that computes it, None: every submesh that reads it.
      rounds: value → round in which it is computed.
      equations: (submesh, round) → equations that run there.
      sent: values sent between submeshes.
    """

    region: FlatRegion
    homes: dict[int, int | None]
    rounds: dict[int, int] = field(default_factory=dict)
    equations: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    sent: set[StepSend] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        region: FlatRegion,
        known: Mapping[int, int],
        left: Mapping[int, int],
        ties: Sequence[tuple[int, int]],
    ) -> After:
        """Assign the equations to submeshes and rounds.

        Args:
          region: equations of the program after the loop.
          known: input of the step, by value id → its submesh, where that is known.
          left: output of the micro-batches, by value id → the submesh that holds it.
          ties: (result, input) that are on one submesh: optimizer state.
        """
        homes = _homes(region, {**known, **left}, ties)
        rounds: dict[int, int] = {}
        for reads, makes in zip(region.reads, region.makes, strict=True):
            near = None, homes.get(makes[0])
            waits = (
                rounds.get(v, 0) + (homes.get(v) not in near)
                for v in reads
                if v in region.maker or v in left
            )
            rounds.update(dict.fromkeys(makes, max(waits, default=0)))
        after = cls(region, homes, rounds)
        seen: set[tuple[int, int]] = set()
        queue = [(after.home(v), v) for v in region.outputs]
        while queue:
            group, value = queue.pop()
            if (group, value) in seen or value in region.consts:
                continue
            seen.add((group, value))
            at, home = region.maker.get(value), homes.get(value)
            if at is None:
                if left.get(value, group) != group:
                    after.sent.add(StepSend(value, left[value], group, -1))
            elif home not in (None, group):
                after.sent.add(StepSend(value, home, group, rounds[value]))
                queue.append((home, value))
            else:
                after.equations.setdefault((group, rounds[value]), set()).add(at)
                queue += [(group, v) for v in region.reads[at]]
        return after

    def home(self, value: int) -> int:
        """Return the submesh of a result; the first one where any could compute it."""
        return self.homes.get(value) or 0


def _homes(
    region: FlatRegion, known: Mapping[int, int], ties: Sequence[tuple[int, int]]
) -> dict[int, int | None]:
    """Propagate known submeshes through the ops: an update is with its parameter."""
    homes: dict[int, int | None] = dict(known)
    for v in region.inputs:
        if v not in homes and _is_light(region, v):
            homes[v] = None
    _tie(homes, ties)
    # Values that only a new state depends on are best computed where that state is.
    for i in reversed(range(len(region.ops))):
        home = homes.get(region.makes[i][0])
        for v in region.reads[i]:
            if home is not None and v in region.maker and not _is_light(region, v):
                homes.setdefault(v, home)
    # A broadcast value, as the scale of clipping in the shape of a gradient, has no
    # more bytes of its own than its operands.
    own = {v: region.bytes(v) for v in region.inputs}
    for reads, makes in zip(region.reads, region.makes, strict=True):
        most = sum(own.get(v, 0) for v in reads)
        own.update({v: min(region.bytes(v), most) for v in makes})
    while True:
        before = len(homes)
        for i in range(len(region.ops)):
            _follow(region, i, homes, own)
        _tie(homes, ties)
        if len(homes) == before:
            break
    for v in (*region.inputs, *region.maker):
        homes.setdefault(v, None if _is_light(region, v) else 0)
    return homes


def _tie(homes: dict[int, int | None], ties: Sequence[tuple[int, int]]) -> None:
    for a, b in ties:
        for x, y in ((a, b), (b, a)):
            if homes.get(x) is not None and homes.get(y) is None:
                homes[y] = homes[x]


def _follow(
    region: FlatRegion, i: int, homes: dict[int, int | None], own: Mapping[int, int]
) -> None:
    reads, makes = region.reads[i], region.makes[i]
    weighed = *makes, *(v for v in reads if not _is_light(region, v))
    known = [homes[v] for v in weighed if homes.get(v) is not None]
    if known:
        home = Counter(known).most_common(1)[0][0]
        for v in weighed:
            homes.setdefault(v, home)
    elif all(_is_light(region, v) for v in weighed) and homes.keys() >= {*reads}:
        # The scale of clipping, a scalar from elsewhere, must not decide where a bias
        # is.
        most = max((own.get(v, 0) for v in reads), default=0)
        of = {homes[v] for v in reads if own.get(v, 0) == most} - {None}
        home = next(iter(of)) if len(of) == 1 else None
        for v in makes:
            homes.setdefault(v, home)


def _is_light(region: FlatRegion, value: int) -> bool:
    return region.bytes(value) <= LIGHT_BYTES
