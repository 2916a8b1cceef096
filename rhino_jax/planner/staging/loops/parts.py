"""Numbers of parts of loops over layers that are worth comparing.

A stack of layers lies in equal parts on consecutive stages, one on each, or as a whole
on one stage. The rest of a step may be in any stage: spread over those with the least
work, or all of it in the slowest. These two give a lower and an upper bound on the
slowest stage, so numbers of parts are dropped before any are traced where their lower
bound is above another's upper bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from rhino_jax.passes.staged.layers import Layers
from rhino_jax.passes.staged.stacks import LayerStack
from rhino_jax.planner.staging.loops.rows import LoopStages, choices_of, rows_of


MAX_LOOPS = 3
"""Maximum number of loops that are split: those with the most work."""

MAX_FORMS = 6
"""Maximum number of splits that are compared by an estimate, before planning."""


def parts_of(
    layers: Sequence[Layers],
    took: Sequence[float],
    rest: float,
    shares: Sequence[int],
) -> list[tuple[LayerStack, ...]]:
    """Return the candidate splits of stacks, the most even first.

    Args:
      layers: the layers of a step.
      took: seconds of the loops over each.
      rest: seconds of all other ops.
      shares: number of places of each submesh along the stage axis.
    Returns:
      For each candidate, the stacks to be split, and their parts; empty: none.
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
        # With submeshes of equal size, the stage cut chooses the stages.
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
    """Bound the seconds of the slowest stage, per share of devices: (lower, upper)."""
    loads = [0.0] * len(shares)
    for seconds, row in zip(took, rows, strict=True):
        mine = range(row.first, row.last + 1)
        for s in mine:
            loads[s] += seconds * shares[s] / sum(shares[k] for k in mine)
    # The rest fills up the stages that have the least work.
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
