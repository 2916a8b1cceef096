"""Topological orders of the ops of a graph."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rhino_jax.pipeline.cut.numbers import CutArrays


@dataclass(frozen=True, slots=True)
class ReadGraph:
    """Dependencies between nodes.

    Attributes:
      before: by node, the nodes that it reads.
      after: by node, the nodes that read it.
    """

    before: tuple[frozenset[int], ...]
    after: tuple[frozenset[int], ...]

    @classmethod
    def of_edges(cls, count: int, edges: Iterable[tuple[int, int]]) -> ReadGraph:
        before: list[set[int]] = [set() for _ in range(count)]
        after: list[set[int]] = [set() for _ in range(count)]
        for source, reader in edges:
            after[source].add(reader)
            before[reader].add(source)
        return cls(tuple(map(frozenset, before)), tuple(map(frozenset, after)))

    @classmethod
    def of(cls, numbers: CutArrays) -> ReadGraph:
        pairs = zip(numbers.sources, numbers.readers, strict=True)
        edges = ((int(s), reader) for s, readers in pairs for reader in readers)
        return cls.of_edges(numbers.count, edges)

    def by_key(self, key: Sequence[float]) -> tuple[int, ...]:
        """Return the topological order that always takes the ready node of smallest
        key."""
        missing = [len(b) for b in self.before]
        ready = [(key[op], op) for op, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            _, op = heapq.heappop(ready)
            order.append(op)
            for reader in self.after[op]:
                missing[reader] -= 1
                if not missing[reader]:
                    heapq.heappush(ready, (key[reader], reader))
        return tuple(order)

    def orders(self) -> list[tuple[int, ...]]:
        """Return distinct topological orders: as numbered, early, late, depth-first.

        Nodes are numbered in a topological order.
        """
        count = len(self.before)
        rise, fall = [0] * count, [0] * count
        for op in range(count):
            rise[op] = 1 + max((rise[b] for b in self.before[op]), default=-1)
        for op in reversed(range(count)):
            fall[op] = min((fall[a] - 1 for a in self.after[op]), default=0)
        numbered = tuple(range(count))
        found = (numbered, self.by_key(rise), self.by_key(fall), self._depth_first())
        return list(dict.fromkeys(found))

    def _depth_first(self) -> tuple[int, ...]:
        """Return the order in which each node's dependencies come right before it."""
        order: list[int] = []
        seen = [False] * len(self.before)
        todo = [(op, False) for op in range(len(self.before))]
        while todo:
            op, is_done = todo.pop()
            if is_done:
                order.append(op)
            elif not seen[op]:
                seen[op] = True
                todo.append((op, True))
                todo += [(b, False) for b in sorted(self.before[op], reverse=True)]
        return tuple(order)
