"""Places whose sums over the batch keep it from being cut into micro-batches."""

from __future__ import annotations

from rhino_jax.errors import CoupledBatchError, MicrobatchError
from rhino_jax.passes.microbatch import may_cut
from rhino_jax.planner.least_memory.variants import LeastMemory


MAX_PLACES = 4
"""How often the places that the last refusal names are added, until a batch is cut."""


def freed(least: LeastMemory) -> tuple[tuple[str, ...], LeastMemory] | None:
    """Return the places whose sums, taken over each micro-batch, leave the batch free
    to be cut, and the search of its variants then; None where no such places are known.

    Args:
      least: a search in which the batch was not cut.
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
