"""Cuts of one order of the ops into intervals, by dynamic programming.

Of all intervals of an order, the best; other cuts of the graph are not seen. As in
`rhino_jax.pipeline.tera`, the least sum under a limit on the pace is found for limits
from above, each below what the last one needed.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from rhino_jax.pipeline.cut.numbers import CutArrays
from rhino_jax.pipeline.cut.order import ReadGraph
from rhino_jax.pipeline.cut.price import ways_ns


_NEVER = 2**60


def fast(numbers: CutArrays, rounds: int = 8, seed: int = 0) -> np.ndarray | None:
    """A stage for every op; None where nothing fits.

    The best of several orders; then of orders that keep the stages of the best so far,
    and are shaken within: each is at least as good, and may move any boundary.

    Args:
      numbers: the problem.
      rounds: orders without gain after which to stop.
      seed: of the shaking.
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
    """The best intervals of an order, and their step time in nanoseconds; None where
    they are no better than a cut that is known."""
    table = _Table(numbers, np.array(order))
    best, best_ns = None, known_ns
    steady = numbers.micro_batches - 1
    least = numbers.least_work_ns + numbers.base_ns

    def most(total: int) -> int:
        """The slowest pace that is still better, with sums of so much at least."""
        better = (best_ns - 1 - total) // steady if steady else _NEVER
        return min(better, numbers.most_pace_ns)

    # A good cut first, near to what every cut needs; then all that may be better.
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
        # Below a limit sums only grow.
        limit = most(least) if is_first else min(bottleneck - 1, most(total))
        is_first = False
        found = table.least_sum(limit) if limit >= pace else None
    if best is None:
        return None
    stages = np.empty(numbers.count, int)
    stages[list(order)] = np.searchsorted(best, np.arange(numbers.count), side="right")
    return stages, best_ns


class _Table:
    """Times and bytes of every interval of an order, and of every boundary.

    Attributes:
      stage_ns: [S, n + 1, n + 1], first op and end; `_NEVER` where the interval does no
        work, does not fit, or holds an op that is pinned elsewhere.
      slowest_ns: of every boundary and hop, the slower direction, [n + 1, S - 1].
      sent_ns: of every boundary and hop, both directions, [n + 1, S - 1].
      hop_ns: the same, with gradients once a step, [n + 1, S - 1].
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
        """Ends of all stages but the last with the least sum of stages and hops, where
        nothing that sets the pace is above the limit.

        From the last stage on, so that the way from a stage to the last and back is
        what was summed up so far.
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
    """Whether an interval, [n + 1, n + 1], cannot be a stage because of a chain: it has
    some ops of a link alone, or two links, or none while it is between two."""
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
    """Of every interval the shared parameters that some op in it reads."""
    count = numbers.count
    held = np.zeros((count + 1, count + 1), np.int64)
    for p, readers in enumerate(numbers.shared):
        before = 0
        for reader in sorted(place[list(readers)]):
            # The first reader at or after these starts is this one.
            held[before : reader + 1, reader + 1] += numbers.shared_bytes[p]
            before = reader + 1
    return np.cumsum(held, axis=1)
