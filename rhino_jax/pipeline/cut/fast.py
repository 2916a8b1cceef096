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
    table = _Table(numbers, np.array(order))
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
    while (found := table.least_sum(limit)) is None and limit < most(least):
        excess *= 2
        limit = min(pace + excess, most(least))
    is_first = limit < most(least)
    while found is not None:
        ends, total = found
        bottleneck = table.bottleneck_of(ends)
        if total + steady * bottleneck < best_ns:
            best, best_ns = ends, total + steady * bottleneck
        # Lower limits only have larger sums.
        limit = most(least) if is_first else min(bottleneck - 1, most(total))
        is_first = False
        found = table.least_sum(limit) if limit >= pace else None
    if best is None:
        return None
    stages = np.empty(numbers.count, int)
    stages[list(order)] = np.searchsorted(best, np.arange(numbers.count), side="right")
    return stages, best_ns


class _Table:
    """Times of every interval of an order, and of every boundary.

    Attributes:
      stage_ns: [S, n + 1, n + 1], by stage, first op and end; `_NEVER` if the interval
        does no work, does not fit, or contains an op that is pinned elsewhere.
      slowest_ns: slower direction of every boundary and hop, [n + 1, S - 1].
      sent_ns: sum of both directions of every boundary and hop, [n + 1, S - 1].
      hop_ns: `sent_ns` with the gradients that are sent once a step, [n + 1, S - 1].
    """

    def __init__(self, numbers: CutArrays, order: np.ndarray) -> None:
        count, stages = numbers.count, numbers.stages
        place = np.empty(count, int)
        place[order] = np.arange(count)
        sent = np.zeros((count + 2, stages - 1, 2), np.int64)
        sent[0] = numbers.latency_ns[:, None]
        received = np.zeros((count + 2, 2), np.int64)
        for v, readers in enumerate(numbers.readers):
            first = place[numbers.sources[v]] + 1
            last = place[list(readers)].max() + 1
            for table, what in (
                (sent, numbers.value_ns),
                (received, numbers.value_bytes),
            ):
                table[first] += what[v]
                table[last] -= what[v]
        once = np.zeros((count + 2, stages - 1), np.int64)
        for p, readers in enumerate(numbers.shared):
            among = place[list(readers)]
            once[among.min() + 1] += numbers.shared_ns[p]
            once[among.max() + 1] -= numbers.shared_ns[p]
        sent, received, once = (
            np.cumsum(t, axis=0)[: count + 1] for t in (sent, received, once)
        )
        self.slowest_ns = sent.max(axis=2)
        self.sent_ns = sent.sum(axis=2)
        self.hop_ns = self.sent_ns + once
        self.round_trips = numbers.round_trips
        self.stages = stages
        self.stage_ns = np.stack(
            [
                self._stage(numbers, order, place, received, stage)
                for stage in range(stages)
            ]
        )

    @staticmethod
    def _stage(
        numbers: CutArrays,
        order: np.ndarray,
        place: np.ndarray,
        received: np.ndarray,
        stage: int,
    ) -> np.ndarray:
        def between(of_ops: np.ndarray) -> np.ndarray:
            sums = np.concatenate([[0], np.cumsum(of_ops[order])])
            return sums[None, :] - sums[:, None]

        seconds = between(numbers.op_ns[:, stage])
        ahead = received[:, :1]
        in_flight = numbers.in_flight[stage]
        held = between(numbers.own_bytes) + _shared_bytes(numbers, place)
        held += in_flight * (between(numbers.activation_bytes) + ahead) + ahead
        if stage < numbers.stages - 1:
            held += received[None, :, 1]
        elsewhere = between((numbers.pins >= 0) & (numbers.pins != stage))
        is_wrong = (
            (seconds <= 0) | (held > numbers.limit_bytes[stage]) | (elsewhere > 0)
        )
        return np.where(is_wrong | _breaks(numbers, place), _NEVER, seconds)

    def least_sum(self, limit: int) -> tuple[np.ndarray, int] | None:
        """Return ends of all stages but the last with the smallest total time.

        All times that determine the pace are at most `limit`; None if there is no such
        cut.

        Computed from the last stage on, so that the round trip from a stage to the last
        is the sum so far.
        """
        count = self.stage_ns.shape[1] - 1
        best = np.full(count + 1, _NEVER)
        best[count] = 0
        way = np.zeros(count + 1, np.int64)
        ends = []
        for stage in reversed(range(self.stages)):
            if stage < self.stages - 1:
                is_slow = self.slowest_ns[:, stage] > limit
                best = np.where(is_slow, _NEVER, best + self.hop_ns[:, stage])
                way = way + self.sent_ns[:, stage]
            times = self.stage_ns[stage]
            sums = np.where(times <= limit, times, _NEVER) + np.minimum(best, _NEVER)
            end = sums.argmin(axis=1)
            rows = np.arange(count + 1)
            best, way = sums[rows, end], way[end] + np.minimum(times[rows, end], _NEVER)
            trips = int(self.round_trips[stage])
            is_late = (way > min(trips * limit, _NEVER)) & (trips > 0)
            best = np.where(is_late, _NEVER, np.minimum(best, _NEVER))
            way = np.minimum(way, _NEVER)
            ends.append(end)
        if best[0] >= _NEVER:
            return None
        found, at = [], 0
        for of_stage in ends[:0:-1]:
            at = int(of_stage[at])
            found.append(at)
        return np.array(found, int), int(best[0])

    def bottleneck_of(self, ends: np.ndarray) -> int:
        count = self.stage_ns.shape[1] - 1
        edges = [0, *map(int, ends), count]
        hops = np.arange(self.stages - 1)
        times = np.array(
            [self.stage_ns[s, edges[s], edges[s + 1]] for s in range(self.stages)]
        )
        ways = ways_ns(times, self.sent_ns[ends, hops], self.round_trips)
        slowest = self.slowest_ns[ends, hops].max(initial=0)
        return int(max(times.max(), slowest, ways.max()))


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
