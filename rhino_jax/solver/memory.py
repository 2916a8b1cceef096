"""Memory over time of a core's assignments, in flat arrays.

Only times that can overflow are represented: the last time before each deallocation,
and of those only times at which the maxima of all nodes exceed the limit.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from rhino_jax.solver.lookups import Beside, Spans
from rhino_jax.solver.problem import UnsatisfiedError
from rhino_jax.solver.reduction import Core


_Span = tuple[int, int, int, int]
"""(node, same or other node, start, stop)."""


@dataclass(slots=True, eq=False)
class Memory:
    """Memory entries: amounts above the minimum of a node or pair, over time intervals.

    Nodes are numbered by position in the core, options over all nodes by `first[node] +
    option`, and times by position among those that can overflow.

    Attributes:
      limit: memory limit.
      room: by time, the limit less the minima of all entries.
      spans: amounts and lifetime of every entry.
      beside: the same amounts by option.
      largest: largest amount of every entry.
      of_node: node → entries that depend on its option.
    """

    limit: float
    room: np.ndarray
    spans: Spans
    beside: Beside
    largest: np.ndarray
    of_node: list[list[int]]

    @property
    def first(self) -> np.ndarray:
        """First option of every node, and the number of all options."""
        return self.beside.first

    def table(self, entry: int) -> np.ndarray:
        """Return an entry's amounts: [options], or [options, other node's options]."""
        held, sizes = self.spans.lookups, np.diff(self.first)
        begin, width = int(held.begin[entry]), int(held.width[entry])
        rows = int(sizes[held.source[entry]])
        cells = held.cells[begin : begin + rows * max(width, 1)]
        return cells.reshape(rows, width) if width else cells

    def profile(self, labels: np.ndarray) -> np.ndarray:
        """Return memory above the minima at every time."""
        return self.spans.profile(labels, len(self.room))

    def excess(self, labels: np.ndarray) -> float:
        """Return the largest excess over the room at any time; 0 if all fits."""
        return float((self.profile(labels) - self.room).max(initial=0.0))

    def priced(self, prices: np.ndarray) -> np.ndarray:
        """Return the cost of every option's memory in single-node entries.

        Args:
          prices: cost per unit of memory, by entry.
        """
        return self.beside.own(prices)

    def by_option(self, labels: np.ndarray, time: int) -> np.ndarray:
        """Return the memory with every option at a time, given other nodes' options."""
        live = (self.spans.start <= time) & (time < self.spans.stop)
        return self.beside.own(live) + self.beside.pairs(labels, rates=live)

    def fullest(self, filled: np.ndarray) -> np.ndarray:
        """Return by entry the maximum of `filled` over its lifetime."""
        levels = [filled]
        while 2 ** len(levels) <= len(filled):
            half = 2 ** (len(levels) - 1)
            levels.append(np.maximum(levels[-1][:-half], levels[-1][half:]))
        depth = np.log2(self.spans.stop - self.spans.start).astype(int)
        out = np.empty(len(depth))
        for d in np.unique(depth):
            mine = depth == d
            begin, end = self.spans.start[mine], self.spans.stop[mine] - 2**d
            out[mine] = np.maximum(levels[d][begin], levels[d][end])
        return out


def build_memory(core: Core, times: Collection[int] | None = None) -> Memory:
    """Build the memory of a core.

    Args:
      core: the core; the memory of eliminated nodes must not depend on their options.
      times: the only times to represent, ascending; None: all.
    Raises:
      UnsatisfiedError: the minima of all nodes exceed the limit at some time.
    """
    place = {node: n for n, node in enumerate(core.costs)}
    usages = core.usages
    starts = np.array([u.start for u in usages], dtype=np.int64)
    stops = np.array([u.stop for u in usages], dtype=np.int64)
    counted = _last_before_a_stop(starts, stops) if times is None else np.array(times)
    least = np.zeros(len(counted) + 1)
    most = np.zeros(len(counted) + 1)
    begins, ends = np.searchsorted(counted, [starts, stops])
    above: dict[_Span, np.ndarray] = {}
    for u, start, stop in zip(usages, begins.tolist(), ends.tolist(), strict=True):
        if start == stop:
            continue
        i, j = u.nodes
        amounts = np.diagonal(u.usage) if i == j and u.usage.ndim == 2 else u.usage
        low = amounts.min()
        least[start] += low
        least[stop] -= low
        amounts = amounts - low
        if amounts.any():
            span = place[i], place[j], start, stop
            above[span] = above.get(span, 0.0) + amounts
            most[start] += amounts.max()
            most[stop] -= amounts.max()
    room = core.limit - np.cumsum(least)[:-1]
    if room.min(initial=0.0) < 0:
        raise UnsatisfiedError(
            "`solve`: no choice stays within the memory limit.",
            where=f"time {counted[int(room.argmin())]}",
            numbers=f"at least {int(core.limit - room.min())} are in use,"
            f" {int(core.limit)} are allowed",
            fix="raise the limit.",
        )
    tight = np.flatnonzero(np.cumsum(most)[:-1] > room)
    sizes = [len(c) for c in core.costs.values()]
    counts = np.array(sizes, dtype=np.int64)
    return _at_times(above, tight, core.limit, room[tight], counts)


def _last_before_a_stop(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return the starts that are followed by a stop before any other start.

    Memory at all other times is no larger than at one of these.
    """
    if not len(starts):
        return starts
    begins, ends = np.unique(starts), np.unique(stops)
    following = np.append(begins[1:], ends[-1])
    return begins[ends[np.searchsorted(ends, begins, side="right")] <= following]


def _at_times(
    above: dict[_Span, np.ndarray],
    times: np.ndarray,
    limit: float,
    room: np.ndarray,
    sizes: np.ndarray,
) -> Memory:
    """Build the memory at some of the times."""
    merged: dict[_Span, np.ndarray] = {}
    starts = np.searchsorted(times, [begin for *_, begin, _ in above]).tolist()
    stops = np.searchsorted(times, [end for *_, end in above]).tolist()
    for ((i, j, *_), amounts), start, stop in zip(
        above.items(), starts, stops, strict=True
    ):
        if start < stop:
            key = i, j, start, stop
            merged[key] = merged.get(key, 0.0) + amounts
    of_node: list[list[int]] = [[] for _ in sizes]
    for e, (i, j, *_) in enumerate(merged):
        for node in {i, j}:
            of_node[node].append(e)
    held = Spans.of([(i, j, merged[i, j, a, b], a, b) for i, j, a, b in merged])
    largest = np.array([amounts.max() for amounts in merged.values()], dtype=float)
    return Memory(limit, room, held, Beside.of(held.lookups, sizes), largest, of_node)
