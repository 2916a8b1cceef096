"""What waits for costs that can hide beside others: see `overlap`."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Wait(enum.IntEnum):
    """What waits for a collective."""

    NONE = 0
    """The next matmul does: it has no slack."""
    BACK = 1
    """The end of the step: what was updated, on its way to where it is fed back."""
    UPDATE = 2
    """Its own update, beside which those of others run: the last gradients."""
    LATER = 3
    """A later matmul."""
    FREE = 4
    """None between the step's start and the reader, or the maker and the step's end."""


@dataclass(frozen=True, slots=True)
class Slack:
    """Attributes:
    nodes: the `Wait` for what a node does after its compute, by node.
    edges: that for a reshard on an edge, by edge.
    """

    nodes: tuple[int, ...]
    edges: tuple[int, ...]

    def where(self, hides_in_updates: bool) -> Slack:
        """The same in terms of NONE, BACK, LATER and FREE alone.

        Args:
          hides_in_updates: whether collectives run beside updates.
        """
        kinds = {w: w for w in Wait}
        kinds[Wait.BACK] = Wait.BACK if hides_in_updates else Wait.NONE
        kinds[Wait.UPDATE] = Wait.FREE if hides_in_updates else Wait.NONE
        table = [int(kinds[w]) for w in Wait]
        return Slack(
            tuple([table[w] for w in self.nodes]),
            tuple([table[w] for w in self.edges]),
        )
