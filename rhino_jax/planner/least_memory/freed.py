"""Places whose sums over the batch keep it from being split into micro-batches."""

from __future__ import annotations

from rhino_jax.errors import CoupledBatchError, MicrobatchError
from rhino_jax.passes.microbatch import may_cut
from rhino_jax.planner.least_memory.variants import LeastMemory


MAX_PLACES = 4
"""Maximum number of rounds in which the places of the last refusal are added until the
batch can be split."""


def freed(least: LeastMemory) -> tuple[tuple[str, ...], LeastMemory] | None:
    """Return the places whose sums must be taken over each micro-batch to make the
    batch divisible, and the search of the variants that this allows; None where no such
    places are known.

    Args:
      least: a search in which the batch could not be split into micro-batches.
    """
    places, refused = least.places, least.refused
    running = least.search.running
    for _ in range(MAX_PLACES):
        more = refused.places if isinstance(refused, CoupledBatchError) else ()
        if not {*more} - {*places}:
            return None
        places = (*dict.fromkeys([*places, *more]),)
        found = may_cut(running.closed_jaxpr, running.program, 2, per_microbatch=places)
        if not isinstance(found, MicrobatchError):
            freely = LeastMemory(
                least.search, True, least.may_recompute, least.has_wish, places
            )
            freely.best()
            return places, freely
        refused = found
    return None
