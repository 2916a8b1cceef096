"""Memory over time of a network's choices, in flat arrays.

Only times that can overflow count: of times between which nothing is freed, the last;
and of those, the ones at which all nodes at their largest would not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhino_jax.optimize.errors import UnsatisfiedError
from rhino_jax.optimize.presolve.network import Network


@dataclass(slots=True, eq=False)
class Memory:
    """Entries: memory above a node's least, while one interval of times lasts.

    Nodes are counted by their place among those left, options over all nodes by
    `first[node] + option`, and times by their place among those that can overflow.

    Attributes:
      first: first option of every node, and the number of all options.
      num_times: times that can overflow.
      room: limit at every time, less what is held whatever is chosen.
      node, start, stop: of every entry; it lasts over [start, stop).
      cells: where an entry's amounts begin, and their number.
      amounts: of all entries, one per option.
      columns, entries: of every amount, its option over all nodes and its entry.
      of_node: node → its entries.
    """

    first: np.ndarray
    num_times: int
    room: np.ndarray
    node: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    cells: np.ndarray
    amounts: np.ndarray
    columns: np.ndarray
    entries: np.ndarray
    of_node: list[list[int]]

    def profile(self, labels: np.ndarray) -> np.ndarray:
        """Memory above the least, at every time."""
        return self._over_time(self.amounts[self.cells[:-1] + labels[self.node]])

    def _over_time(self, amounts: np.ndarray) -> np.ndarray:
        change = np.bincount(self.start, amounts, self.num_times + 1)
        change -= np.bincount(self.stop, amounts, self.num_times + 1)
        return np.cumsum(change)[:-1]

    def excess(self, labels: np.ndarray) -> float:
        """How far the fullest time is over its room; 0 where all fits."""
        return float((self.profile(labels) - self.room).max(initial=0.0))

    def priced(self, prices: np.ndarray) -> np.ndarray:
        """Cost of every option at a price per unit of memory, of every entry."""
        return np.bincount(
            self.columns, prices[self.entries] * self.amounts, int(self.first[-1])
        )

    def fullest(self, filled: np.ndarray) -> np.ndarray:
        """Of every entry, the largest of `filled` while it lasts."""
        levels = [filled]
        while 2 ** len(levels) <= len(filled):
            half = 2 ** (len(levels) - 1)
            levels.append(np.maximum(levels[-1][:-half], levels[-1][half:]))
        depth = np.log2(self.stop - self.start).astype(int)
        out = np.empty(len(depth))
        for d in np.unique(depth):
            mine = depth == d
            begin, end = self.start[mine], self.stop[mine] - 2**d
            out[mine] = np.maximum(levels[d][begin], levels[d][end])
        return out


def build_memory(network: Network) -> Memory:
    """The memory of a network.

    Raises:
      UnsatisfiedError: at some time even the least that all nodes hold is too much.
    """
    uses = [
        (n, use) for n, node in enumerate(network.costs) for use in network.uses[node]
    ]
    sizes = [len(c) for c in network.costs.values()]
    times = _last_before_a_stop(
        np.array([u.start for _, u in uses]), np.array([u.stop for _, u in uses])
    )
    least = np.zeros(len(times) + 1)
    most = np.zeros(len(times) + 1)
    merged: dict[tuple[int, int, int], np.ndarray] = {}
    for n, use in uses:
        start, stop = np.searchsorted(times, [use.start, use.stop])
        low = use.amounts.min()
        least[start] += low
        least[stop] -= low
        if (above := use.amounts - low).any() and start < stop:
            key = n, int(start), int(stop)
            merged[key] = merged.get(key, 0.0) + above
            most[start] += above.max()
            most[stop] -= above.max()
    room = network.limit - np.cumsum(least)[:-1]
    if room.min(initial=0.0) < 0:
        raise UnsatisfiedError(
            "`solve`: no choice stays within the memory limit.",
            where=f"time {times[int(room.argmin())]}",
            numbers=f"at least {int(network.limit - room.min())} are in use,"
            f" {int(network.limit)} are allowed",
            fix="raise the limit.",
        )
    tight = np.flatnonzero(np.cumsum(most)[:-1] > room)
    return _flatten(merged, tight, room[tight], sizes)


def _last_before_a_stop(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Starts after which something stops before anything else starts: at all other
    times no more is held than at one of these."""
    if not len(starts):
        return starts
    begins, ends = np.unique(starts), np.unique(stops)
    following = np.append(begins[1:], ends[-1])
    return begins[ends[np.searchsorted(ends, begins, side="right")] <= following]


def _flatten(
    uses: dict[tuple[int, int, int], np.ndarray],
    times: np.ndarray,
    room: np.ndarray,
    sizes: list[int],
) -> Memory:
    merged: dict[tuple[int, int, int], np.ndarray] = {}
    for (node, begin, end), amounts in uses.items():
        start, stop = np.searchsorted(times, [begin, end])
        if start < stop:
            key = node, int(start), int(stop)
            merged[key] = merged.get(key, 0.0) + amounts
    node, start, stop = np.array(list(merged) or np.zeros((0, 3)), dtype=int).T
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    lengths = np.array([len(a) for a in merged.values()], dtype=int)
    cells = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    entries = np.repeat(np.arange(len(lengths)), lengths)
    of_node: list[list[int]] = [[] for _ in sizes]
    for e, n in enumerate(node):
        of_node[n].append(e)
    return Memory(
        first=first,
        num_times=len(times),
        room=room,
        node=node,
        start=start,
        stop=stop,
        cells=cells,
        amounts=np.concatenate([*merged.values(), np.zeros(0)]),
        columns=first[node][entries] + np.arange(cells[-1]) - cells[entries],
        entries=entries,
        of_node=of_node,
    )
