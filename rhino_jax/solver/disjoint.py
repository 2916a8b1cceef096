"""Disjoint sets of things that turn out to be one."""

from __future__ import annotations

from typing import Any, Generic, TypeVar


T = TypeVar("T", bound=Any)


class DisjointSets(Generic[T]):
    """Sets that are united step by step; each is named by its smallest member.

    Source: Tarjan, "Efficiency of a Good But Not Linear Set Union Algorithm" (JACM
    1975), with path compression.
    """

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def find(self, member: T) -> T:
        """The set of a member, as its smallest member."""
        parent = self._parent
        root = member
        while (up := parent.get(root)) is not None:
            root = up
        while member != root:
            parent[member], member = root, parent[member]
        return root

    def union(self, a: T, b: T) -> None:
        root_a, root_b = self.find(a), self.find(b)
        if root_a != root_b:
            low, high = sorted((root_a, root_b))
            self._parent[high] = low
