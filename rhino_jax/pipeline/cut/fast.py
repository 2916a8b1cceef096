"""Cuts of one order of the ops into intervals, by dynamic programming.

Finds the best intervals of an order; other cuts of the graph are not considered. As in
`rhino_jax.pipeline.tera`, the least sum under a limit on the pace is found for limits
from above, each below the pace of the last result.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from rhino_jax.pipeline.cut.numbers import CutArrays, ReadGraph, ways_ns


_NEVER = 2**60


def fast(numbers: CutArrays, rounds: int = 8, seed: int = 0) -> np.ndarray | None:
    """Return a stage for every op; None if no cut fits.

    The best cut of several orders, then of random orders that preserve the stages of
    the best cut so far: each of these is at least as good, and may move any boundary.

    Args:
      numbers: the problem.
      rounds: number of orders without improvement after which to stop.
      seed: seed of the random orders.
    """
    graph = ReadGraph.of(numbers)
    best, best_ns = None, _NEVER
    for order in graph.orders():
        found = cut_in_order(numbers, order, best_ns)
        if found is not None:
            best, best_ns = found
    rng = np.random.default_rng(seed)
    left = rounds
    while left and best is not None:
        order = graph.by_key((best + rng.random(numbers.count)).tolist())
        found = cut_in_order(numbers, order, best_ns)
        left -= 1
        if found is not None:
            best, best_ns = found
            left = rounds
    return best


def cut_in_order(
    numbers: CutArrays, order: tuple[int, ...], known_ns: int = _NEVER
) -> tuple[np.ndarray, int] | None:
    """Return the best intervals of an order, and their step time in nanoseconds.

    None if they are no better than a known cut.
    """
    place = np.empty(numbers.count, int)
    place[list(order)] = np.arange(numbers.count)
    received, sent, once = _over_boundaries(numbers, place)
    stage_ns = _by_interval(numbers, order, place, received)
    # The slower direction of every boundary and hop, [n + 1, S - 1], and their sum.
    slowest_ns, sent_ns = sent.max(axis=2), sent.sum(axis=2)
    stages, end_of_all, rows = (
        range(numbers.stages),
        numbers.count,
        np.arange(len(sent)),
    )

    def least_sum(limit: int) -> tuple[np.ndarray, int] | None:
        """Return ends of all stages but the last with the smallest total time.

        All times that determine the pace are at most `limit`; None if there is no such
        cut.

        Computed from the last stage on, so that the round trip from a stage to the last
        is the sum so far.
        """
        best, way = np.full(len(rows), _NEVER), np.zeros(len(rows), np.int64)
        best[end_of_all] = 0
        ends = []
        for stage in reversed(stages):
            if stage < stages[-1]:
                is_slow = slowest_ns[:, stage] > limit
                hop_ns = sent_ns[:, stage] + once[:, stage]
                best = np.where(is_slow, _NEVER, best + hop_ns)
                way = way + sent_ns[:, stage]
            times = stage_ns[stage]
            sums = np.where(times <= limit, times, _NEVER) + np.minimum(best, _NEVER)
            end = sums.argmin(axis=1)
            best, way = sums[rows, end], way[end] + np.minimum(times[rows, end], _NEVER)
            trips = int(numbers.round_trips[stage])
            is_late = (way > min(trips * limit, _NEVER)) & (trips > 0)
            best = np.where(is_late, _NEVER, np.minimum(best, _NEVER))
            way = np.minimum(way, _NEVER)
            ends.append(end)
        if best[0] >= _NEVER:
            return None
        found = [0]
        for of_stage in ends[:0:-1]:
            found.append(int(of_stage[found[-1]]))
        return np.array(found[1:], int), int(best[0])

    def bottleneck_of(ends: np.ndarray) -> int:
        edges, hops = [0, *map(int, ends), end_of_all], stages[:-1]
        times = stage_ns[stages, edges[:-1], edges[1:]]
        ways = ways_ns(times, sent_ns[ends, hops], numbers.round_trips)
        slowest = slowest_ns[ends, hops].max(initial=0)
        return int(max(times.max(), slowest, ways.max()))

    best, best_ns = None, known_ns
    steady = numbers.micro_batches - 1
    least = numbers.least_work_ns + numbers.base_ns

    def most(total: int) -> int:
        """Return the slowest pace that is still an improvement with the sum `total`."""
        better = (best_ns - 1 - total) // steady if steady else _NEVER
        return min(better, numbers.most_pace_ns)

    # First a good cut, close to the lower bound; then all limits that may improve it.
    pace = numbers.least_bottleneck_ns
    excess = pace // 128 + 1
    limit = min(pace + excess, most(least))
    while (found := least_sum(limit)) is None and limit < most(least):
        excess *= 2
        limit = min(pace + excess, most(least))
    is_first = limit < most(least)
    while found is not None:
        ends, total = found
        bottleneck = bottleneck_of(ends)
        if total + steady * bottleneck < best_ns:
            best, best_ns = ends, total + steady * bottleneck
        # Lower limits only have larger sums.
        limit = most(least) if is_first else min(bottleneck - 1, most(total))
        is_first = False
        found = least_sum(limit) if limit >= pace else None
    if best is None:
        return None
    return np.searchsorted(best, place, side="right"), best_ns


def _over_boundaries(
    numbers: CutArrays, place: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what is sent over every boundary of an order, were it that of a hop.

    Returns:
      Bytes of both directions, [n + 1, 2]; times by hop and direction, [n + 1, S - 1,
      2]; times by hop of gradients that are sent once a step, [n + 1, S - 1].
    """
    found = []
    many = [
        (s, *readers)
        for s, readers in zip(numbers.sources, numbers.readers, strict=True)
    ]
    for ends, sizes in (
        (many, numbers.value_bytes),
        (many, numbers.value_ns),
        (numbers.shared, numbers.shared_ns),
    ):
        places = [place[list(ops)] for ops in ends]
        table = np.zeros((numbers.count + 2, *sizes.shape[1:]), np.int64)
        np.add.at(table, np.array([p.min() + 1 for p in places], int), sizes)
        np.subtract.at(table, np.array([p.max() + 1 for p in places], int), sizes)
        found.append(np.cumsum(table, axis=0)[:-1])
    received, sent, once = found
    return received, sent + numbers.latency_ns[:, None], once


def _by_interval(
    numbers: CutArrays,
    order: tuple[int, ...],
    place: np.ndarray,
    received: np.ndarray,
) -> np.ndarray:
    """Return the time of every interval as a stage, [S, n + 1, n + 1], by stage, first
    op and end; `_NEVER` if the interval does no work, does not fit, or contains an op
    that is pinned elsewhere."""

    def between(of_ops: np.ndarray) -> np.ndarray:
        sums = np.concatenate([[0], np.cumsum(of_ops[list(order)])])
        return sums[None, :] - sums[:, None]

    ahead = received[:, :1]
    own = between(numbers.own_bytes) + _shared_bytes(numbers, place) + ahead
    flying = between(numbers.activation_bytes) + ahead
    breaks, found = _breaks(numbers, place), []
    for stage, limit in enumerate(numbers.limit_bytes):
        seconds = between(numbers.op_ns[:, stage])
        held = own + numbers.in_flight[stage] * flying
        if stage < numbers.stages - 1:
            held = held + received[None, :, 1]
        elsewhere = between((numbers.pins >= 0) & (numbers.pins != stage))
        is_wrong = breaks | (seconds <= 0) | (held > limit) | (elsewhere > 0)
        found.append(np.where(is_wrong, _NEVER, seconds))
    return np.stack(found)


def _breaks(numbers: CutArrays, place: np.ndarray) -> np.ndarray:
    """Return which intervals, [n + 1, n + 1], chains exclude as stages.

    An interval is excluded if it has only a part of a link's ops, or two links, or none
    although it is between two.
    """
    start, end = np.ogrid[: numbers.count + 1, : numbers.count + 1]
    found = np.zeros((numbers.count + 1, numbers.count + 1), bool)
    for chain in numbers.chains:
        at = [(place[list(link)].min(), place[list(link)].max()) for link in chain]
        for first, last in at:
            for edge in (start, end):
                found |= (first < edge) & (edge <= last)
        for (_, last), (first, _) in pairwise(at):
            found |= (start <= last) & (end > first)
            found |= (start > last) & (end <= first)
    return found


def _shared_bytes(numbers: CutArrays, place: np.ndarray) -> np.ndarray:
    """Return by interval the bytes of the shared parameters that its ops read."""
    count = numbers.count
    held = np.zeros((count + 1, count + 1), np.int64)
    for p, readers in enumerate(numbers.shared):
        before = 0
        for reader in sorted(place[list(readers)]):
            # This is the first reader at or after these starts.
            held[before : reader + 1, reader + 1] += numbers.shared_bytes[p]
            before = reader + 1
    return np.cumsum(held, axis=1)
