"""Slack of collectives: the ops that wait for them, and so what can hide them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Wait(enum.IntEnum):
    """The first op that waits for a collective."""

    NONE = 0
    """The next matmul: it has no slack."""
    BACK = 1
    """The end of the step: an updated value is resharded before it is fed back."""
    UPDATE = 2
    """Its own update, concurrent with other updates: the last gradients."""
    LATER = 3
    """A later matmul."""
    FREE = 4
    """None: it can run from the step's start on, or until the step's end."""


@dataclass(frozen=True, slots=True)
class Slack:
    """Slack of all collectives of a problem.

    Attributes:
      nodes: by node, the `Wait` of the collectives after its compute.
      edges: by edge, the `Wait` of its reshard.
    """

    nodes: tuple[int, ...]
    edges: tuple[int, ...]

    def where(self, hides_in_updates: bool) -> Slack:
        """Return the slack in terms of NONE, BACK, LATER and FREE alone.

        Args:
          hides_in_updates: whether collectives can overlap with updates.
        """
        kinds = {w: w for w in Wait}
        kinds[Wait.BACK] = Wait.BACK if hides_in_updates else Wait.NONE
        kinds[Wait.UPDATE] = Wait.FREE if hides_in_updates else Wait.NONE
        table = [int(kinds[w]) for w in Wait]
        return Slack(
            tuple([table[w] for w in self.nodes]),
            tuple([table[w] for w in self.edges]),
        )
