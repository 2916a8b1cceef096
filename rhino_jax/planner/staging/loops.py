"""Loops over layers, split over stages: candidate numbers of parts.

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

from rhino_jax.passes.staged.layers import Layers, layers_of
from rhino_jax.passes.staged.sides import sides_of
from rhino_jax.passes.staged.stacks import LayerStack
from rhino_jax.planner.meshes import MeshAxes
from rhino_jax.planner.staging.cuts import StagingRequest, worth_comparing
from rhino_jax.planner.staging.shapes import (
    StepBound,
    shapes_of,
    with_regions,
)


MAX_LOOPS = 3
"""Maximum number of loops that are split: those with the most work."""

MAX_FORMS = 6
"""Maximum number of splits that are compared by an estimate, before planning."""


def choices_of(length: int, shares: Sequence[int]) -> list[range]:
    """Return the consecutive stages over which some layers can be split in proportion
    to the submeshes' shares."""
    return [
        range(first, end)
        for first in range(len(shares))
        for end in range(first + 1, len(shares) + 1)
        for mine in [shares[first:end]]
        # A larger submesh shards its part by layers, too.
        if len(mine) == 1 or (length % sum(mine) == 0 and min(mine) == 1)
    ]


def rows_of(
    choices: Sequence[Sequence[range]], after: Sequence[set[int]]
) -> list[tuple[range, ...]]:
    """Return the stages of all loops; a loop that comes after another starts no earlier
    than the stage where that one ends."""

    found: list[tuple[range, ...]] = [()]
    for at, own in enumerate(choices):
        found = [
            (*rows, row)
            for rows in found
            for row in own
            if all(rows[f][-1] <= row[0] for f in after[at] if f < at)
            and all(row[-1] <= rows[g][0] for g in range(at) if at in after[g])
        ]
    return found


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
    least: dict[tuple[range, ...], float] = {}
    most = math.inf
    for rows in rows_of([choices_of(x.length, shares) for x in layers], after):
        low, high = _bounds(took, rows, shares, rest)
        # With submeshes of equal size, the stage cut chooses the stages.
        key = tuple(range(len(row)) for row in rows) if is_even else rows
        least[key] = min(low, least.get(key, math.inf))
        most = min(most, high)
    good = [rows for rows, low in least.items() if low <= most]
    found = heapq.nsmallest(
        MAX_FORMS, good, key=lambda rows: (least[rows], sum(-len(row) for row in rows))
    )
    return [
        tuple(
            LayerStack(
                of.slots,
                tuple(of.length * share // sum(mine) for share in mine),
                None if is_even else row[0],
            )
            for of, row in zip(layers, rows, strict=True)
            if len(row) > 1
            for mine in [shares[row[0] : row[-1] + 1]]
        )
        for rows in found
    ]


def _bounds(
    took: Sequence[float],
    rows: Sequence[range],
    shares: Sequence[int],
    rest: float,
) -> tuple[float, float]:
    """Bound the seconds of the slowest stage, per share of devices: (lower, upper)."""
    loads = [0.0] * len(shares)
    for seconds, row in zip(took, rows, strict=True):
        for s in row:
            loads[s] += seconds * shares[s] / sum(shares[k] for k in row)
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


def all_layers(asked: StagingRequest) -> tuple[Layers, ...]:
    """Return the layers of a step whose loops are whole."""
    return layers_of(asked.of_step.program, asked.batch.inputs)


def forms_of(
    whole: StagingRequest, rounds: Sequence[Sequence[int]]
) -> tuple[list[tuple[LayerStack, ...]], Sequence[MeshAxes]]:
    """Return the candidate splits of stacks, the most even first, and the meshes that
    are then worth comparing.

    Args:
      whole: the step, its loops whole.
      rounds: numbers of micro-batches, the usual one first.
    Returns:
      For each candidate, the stacks to be split, and their parts (empty: none); the
        meshes.
    Raises:
      NotFaster: no number of micro-batches makes a step short enough.
    """
    counts = rounds[0]
    program, meshes = whole.of_step.program, whole.search.meshes
    layers = all_layers(whole)
    choices = [choices_of(of.length, whole.shares) for of in layers]
    is_whole = all(len(row) == 1 for rows in choices for row in rows)
    is_whole |= any(entry.is_const for entry in program.inputs)
    if is_whole and math.isinf(whole.search.enough_s):
        return [()], meshes
    apart = whole.apart(counts[0])
    sides = sides_of(apart)
    search, shares = whole.search, whole.shares
    bound = StepBound([n for counts in rounds for n in counts], search.enough_s)
    shapes = shapes_of(search, sides, shares, meshes, whole.finds, bound)
    bound.check(shapes)
    if is_whole:
        return [()], shapes.good
    seconds = shapes.seconds[whole.shares[0]]
    program = sides.program
    data = [
        entry.value
        for entry, sources in zip(program.inputs[1:], apart.sources, strict=False)
        if sources & apart.data
    ]
    took = [0.0] * len(layers)
    for inner in layers_of(program, data):
        read = [apart.sources[i - 1] for i in inner.slots if i > 0]
        sources = frozenset().union(*read)
        own = [k for k, of in enumerate(layers) if of.slots & sources]
        for k in own[:1]:
            took[k] += sum(with_regions(program, seconds, op) for op in inner.loops)
    rest = sum(seconds.values()) - sum(took)
    return parts_of(layers, took, rest, whole.shares), worth_comparing(
        shapes, apart, max(counts)
    )
