"""Into how many parts loops over layers may be cut, and which of that is worth a look.

A stack of layers lies in equal parts on stages in a row, one on each, or as a whole on
one stage. What is left of a step may be in any stage: spread over those that have the
least to do, or all of it in the slowest. Between these two lies what the slowest stage
takes, so numbers of parts are left out before any are traced where the first is more
than the second is of others.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from rhino_jax.passes.staged.layers import Layers
from rhino_jax.passes.staged.stacks import LayerStack
from rhino_jax.planner.staging.loops.rows import LoopStages, choices_of, rows_of


MAX_LOOPS = 3
"""Loops that are cut, those with the most work; others stay whole."""

MAX_FORMS = 6
"""Numbers of parts that are compared by an estimate; the best of them are planned."""


def parts_of(
    layers: Sequence[Layers],
    took: Sequence[float],
    rest: float,
    shares: Sequence[int],
) -> list[tuple[LayerStack, ...]]:
    """Stacks to be cut, and into which parts, the most even first; empty: none.

    Args:
      layers: of a step.
      took: seconds of the loops over each.
      rest: seconds of all else.
      shares: of every group of devices, its places along the axis of the stages.
    """
    order = sorted(range(len(layers)), key=lambda k: -took[k])
    chosen = sorted(order[:MAX_LOOPS])
    rest += sum(took[k] for k in order[MAX_LOOPS:])
    layers, took = [layers[k] for k in chosen], [took[k] for k in chosen]
    after = [{chosen.index(f) for f in x.after if f in chosen} for x in layers]
    is_even = len({*shares}) == 1
    least: dict[tuple[LoopStages, ...], float] = {}
    most = math.inf
    for rows in rows_of([choices_of(x.length, shares) for x in layers], after):
        low, high = _bounds(took, rows, shares, rest)
        # Of groups of equal size the cut chooses the stages.
        key = tuple(LoopStages(0, r.count) for r in rows) if is_even else rows
        least[key] = min(low, least.get(key, math.inf))
        most = min(most, high)
    good = [rows for rows, low in least.items() if low <= most]
    found = heapq.nsmallest(
        MAX_FORMS, good, key=lambda rows: (least[rows], sum(-r.count for r in rows))
    )
    return [_stacks(layers, rows, shares, is_even=is_even) for rows in found]


def _bounds(
    took: Sequence[float],
    rows: Sequence[LoopStages],
    shares: Sequence[int],
    rest: float,
) -> tuple[float, float]:
    """The least and the most that the slowest stage takes for its share of devices."""
    loads = [0.0] * len(shares)
    for seconds, row in zip(took, rows, strict=True):
        mine = range(row.first, row.last + 1)
        for s in mine:
            loads[s] += seconds * shares[s] / sum(shares[k] for k in mine)
    # What is left fills up the stages that have the least.
    paces = sorted(
        (load / share, share) for load, share in zip(loads, shares, strict=True)
    )
    slowest, share = paces[-1]
    most = slowest + rest / share
    level, places = paces[0]
    for pace, share in paces[1:]:
        if (pace - level) * places >= rest:
            break
        rest -= (pace - level) * places
        places, level = places + share, pace
    return max(slowest, level + rest / places), most


def _stacks(
    layers: Sequence[Layers],
    rows: Sequence[LoopStages],
    shares: Sequence[int],
    *,
    is_even: bool,
) -> tuple[LayerStack, ...]:
    found = []
    for of, row in zip(layers, rows, strict=True):
        if row.count > 1:
            mine = shares[row.first : row.last + 1]
            sizes = tuple(of.length * share // sum(mine) for share in mine)
            found.append(LayerStack(of.slots, sizes, None if is_even else row.first))
    return tuple(found)
