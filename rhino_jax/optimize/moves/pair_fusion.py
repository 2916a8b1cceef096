"""Choices put together: of those that are near, CP-SAT takes the better parts.

Source: fusion moves: Lempitsky, Rother, Roth, Blake, PAMI 32 (2010).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rhino_jax.optimize.exact import Limits, settle
from rhino_jax.optimize.moves.moves import Moves


def fuse(
    moves: Moves, best: np.ndarray, others: Sequence[np.ndarray], limits: Limits
) -> np.ndarray | None:
    """The best choice whose every option is that of `best` or of one of `others`.

    Args:
      moves: the network.
      best: a choice within the memory limit.
      others: other choices, within it or not.
      limits: of time.
    Returns:
      A choice within the limit; None where none was found in time, or nothing differs.
    """
    every = np.array([best, *others])
    differ = np.flatnonzero((every != best).any(axis=0)).tolist()
    if not differ:
        return None
    allowed = {n: np.unique(every[:, n]) for n in differ}
    return settle(moves, best, differ, limits, allowed).labels
