"""Bounds a step in stages before it is planned, where it has to be faster than another.

To plan stages takes many searches: loops in parts, numbers of micro-batches, schedules
and then every group. One search comes before all of these, that of a whole micro-batch
on the devices of a group, and mostly it says that stages gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from rhino_jax.planner.staging.shapes import GroupMeshes


NEAR = 0.03
"""Share by which a search at level "fast" may be above the best (`EFFORTS`)."""


class NotFaster(Exception):
    """A plan is not enough.

    Attributes:
      step_s: the shortest that was planned, or a bound on all; infinite where nothing
        is known but that it is not enough.
      count: of micro-batches.
    """

    def __init__(self, step_s: float, count: int = 0) -> None:
        super().__init__(step_s)
        self.step_s, self.count = step_s, count


def check_any(
    shapes: GroupMeshes,
    rounds: Sequence[Sequence[int]],
    enough_s: float,
    *,
    sends: bool = True,
) -> None:
    """Refuse numbers of stages with which a step takes too long in any number of
    micro-batches.

    Args:
      shapes: of the groups, with what a micro-batch takes on each, in the first number.
      rounds: numbers of micro-batches.
      enough_s: what a step has to be shorter than.
      sends: whether collectives count; without, a bound on other meshes too, of which
        more axes save collectives.
    Raises:
      NotFaster: with no number of micro-batches a step is.
    """
    if not sends:
        seconds = {n: {0: compute_s} for n, compute_s in shapes.compute_s.items()}
        shapes = replace(shapes, seconds=seconds)
    searched, slower = rounds[0][0], list[NotFaster]()
    for count in chain.from_iterable(rounds):
        try:
            check_enough(shapes, searched, count, enough_s)
        except NotFaster as refused:
            slower.append(refused)
        else:
            return
    raise min(slower, key=lambda refused: refused.step_s)


def check_enough(
    shapes: GroupMeshes, searched: int, count: int, enough_s: float
) -> None:
    """Refuse a number of micro-batches with which a step takes too long, however it is
    cut and scheduled.

    Args:
      shapes: of the groups, with what a micro-batch takes on each.
      searched: number of micro-batches of which that is one.
      count: number of micro-batches.
      enough_s: what a step has to be shorter than.
    Raises:
      NotFaster: it is not.
    """
    bound_s = least_step_s(shapes, searched, count)
    if bound_s >= enough_s:
        raise NotFaster(bound_s, count)


def least_step_s(shapes: GroupMeshes, searched: int, count: int) -> float:
    """A bound on a step: every group does as large a share of the model as it is fast,
    and the pipeline fills as with the gradients of weights computed late, in a third of
    the time of 1F1B (Qi et al. 2023, table 1). In fewer micro-batches all collectives
    that are the same for each, as of weights, are as much fewer; in more, none.

    Args: as of `check_enough`.
    """
    rates = [
        1 / seconds if (seconds := _seconds(shapes, group, searched, count)) else 0.0
        for group in range(shapes.groups)
    ]
    if not all(rates):
        return 0.0
    # Fewer micro-batches than groups may run in slices, which fill the pipeline.
    idle = (shapes.groups - 1) / (3 * count) if count >= shapes.groups else 0.0
    return (1 - NEAR) / sum(rates) * (1 + idle)


def _seconds(shapes: GroupMeshes, group: int, searched: int, count: int) -> float:
    """Of all micro-batches, were the whole model on one group."""
    places = shapes.places[group]
    total_s = math.fsum(shapes.seconds[places].values())
    compute_s = min(total_s, shapes.compute_s.get(places, 0.0))
    sent_s = (total_s - compute_s) * min(1.0, count / searched)
    return searched * (compute_s + sent_s)
