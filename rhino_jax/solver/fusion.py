"""Choices put together: of two that fit, CP-SAT takes the better parts.

Source: fusion moves: Lempitsky, Rother, Roth, Blake, PAMI 32 (2010).
"""

from __future__ import annotations

import numpy as np

from rhino_jax.solver.exact import settle
from rhino_jax.solver.moves import Moves


FUSE_S = 3.0
"""Seconds that CP-SAT has to put two choices together; mostly it needs less."""


def fuse(
    moves: Moves,
    best: np.ndarray,
    other: np.ndarray,
    *,
    seconds: float,
    workers: int,
    seed: int = 0,
) -> np.ndarray | None:
    """The best choice whose every option is that of `best` or of `other`.

    Args:
      moves: the network.
      best: a choice within the memory limit.
      other: another, within it or not.
      seconds: wall-clock limit.
      workers, seed: of CP-SAT.
    Returns:
      A choice within the limit; None where none was found in time.
    """
    differ = np.flatnonzero(best != other).tolist()
    if not differ:
        return None
    allowed = {n: np.unique([best[n], other[n]]) for n in differ}
    return settle(
        moves,
        best,
        differ,
        seconds=min(seconds, FUSE_S),
        workers=workers,
        seed=seed,
        allowed=allowed,
    ).labels
