"""Lower bounds on a step in stages that has to beat another plan.

Planning stages takes many searches: split loops, numbers of micro-batches, schedules
and then every submesh. One search comes before all of these, that of a whole
micro-batch on a submesh, and mostly it proves that stages gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from rhino_jax.planner.decision import NotFaster
from rhino_jax.planner.staging.shapes import MAX_AXIS_GAIN, GroupMeshes
from rhino_jax.planner.variant_search import NEAR


def check_any(
    shapes: GroupMeshes, rounds: Sequence[Sequence[int]], enough_s: float
) -> None:
    """Refuse a number of stages that is too slow in any number of micro-batches.

    Args:
      shapes: the submeshes, with the seconds of a micro-batch on each, for the first
        number of micro-batches.
      rounds: numbers of micro-batches.
      enough_s: seconds that a step has to be shorter than.
    Raises:
      NotFaster: no number of micro-batches makes a step fast enough.
    """
    searched, slower = rounds[0][0], list[NotFaster]()
    for count in chain.from_iterable(rounds):
        try:
            check_enough(shapes, searched, count, enough_s)
        except NotFaster as refused:
            slower.append(refused)
        else:
            return
    raise min(slower, key=lambda refused: refused.step_s)


def bound_of_axes(
    rounds: Sequence[Sequence[int]], enough_s: float
) -> Callable[[GroupMeshes], float] | None:
    """Return `bound_axes` of `shapes_of`; None where there is no plan to beat.

    Args:
      rounds, enough_s: as for `check_any`.
    """
    if math.isinf(enough_s):
        return None
    return partial(most_seconds, rounds=rounds, enough_s=enough_s)


def most_seconds(
    shapes: GroupMeshes, rounds: Sequence[Sequence[int]], enough_s: float
) -> float:
    """Return the seconds of a micro-batch on a submesh from which on a step is too slow
    in any number of micro-batches, on meshes of more axes: these save collectives, but
    no compute.

    Args:
      shapes: equal submeshes of few axes; for the others, see `check_any`.
    Raises:
      NotFaster: compute alone takes too long, or more than `MAX_AXIS_GAIN` has to be
        saved.
    """
    (size,) = {*shapes.places}
    compute_s = shapes.compute_s[size]
    alone = replace(shapes, seconds={size: {0: compute_s}})
    check_any(alone, rounds, enough_s)
    searched = rounds[0][0]
    sent_s = 0.0
    for count in chain.from_iterable(rounds):
        # A step is as long as its compute and a share of the sent seconds.
        least_s = least_step_s(alone, searched, count)
        each = least_s / compute_s * min(1.0, count / searched) if compute_s else 0.0
        sent_s = max(sent_s, (enough_s - least_s) / each) if each else math.inf
    most_s = compute_s + sent_s
    if (1 - MAX_AXIS_GAIN) * math.fsum(shapes.seconds[size].values()) > most_s:
        check_any(shapes, rounds, enough_s)
    return most_s


def check_enough(
    shapes: GroupMeshes, searched: int, count: int, enough_s: float
) -> None:
    """Refuse a number of micro-batches with which a step takes too long, however it is
    cut and scheduled.

    Args:
      shapes: the submeshes, with the seconds of a micro-batch on each.
      searched: the number of micro-batches which those seconds are for.
      count: the number of micro-batches to check.
      enough_s: seconds that a step has to be shorter than.
    Raises:
      NotFaster: it is not.
    """
    bound_s = least_step_s(shapes, searched, count)
    if bound_s >= enough_s:
        raise NotFaster(bound_s, count)


def least_step_s(shapes: GroupMeshes, searched: int, count: int) -> float:
    """Return a lower bound on a step: every submesh has a share of the model in
    proportion to its speed, and the pipeline fills as with late weight gradients, in a
    third of the time of 1F1B (Qi et al. 2023, table 1).

    In fewer micro-batches, collectives whose size does not depend on the micro-batch,
    such as those of weights, shrink in proportion; in more, they are not counted more
    often.

    Args:
      shapes, searched, count: see `check_enough`.
    """
    rates = [
        1 / seconds if (seconds := _seconds(shapes, group, searched, count)) else 0.0
        for group in range(shapes.groups)
    ]
    if not all(rates):
        return 0.0
    # Fewer micro-batches than stages may run in sequence slices, which fill the
    # pipeline.
    idle = (shapes.groups - 1) / (3 * count) if count >= shapes.groups else 0.0
    return (1 - NEAR) / sum(rates) * (1 + idle)


def _seconds(shapes: GroupMeshes, group: int, searched: int, count: int) -> float:
    """Return the seconds of all micro-batches, were the whole model on one submesh."""
    places = shapes.places[group]
    total_s = math.fsum(shapes.seconds[places].values())
    compute_s = min(total_s, shapes.compute_s.get(places, 0.0))
    sent_s = (total_s - compute_s) * min(1.0, count / searched)
    return searched * (compute_s + sent_s)
