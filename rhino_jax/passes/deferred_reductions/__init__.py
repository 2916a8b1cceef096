"""Partial sums that stay open past linear ops and loops, until they meet.

In: a closed jaxpr with its program; what a first plan of it cuts, and prices.
Out: a closed jaxpr of the same arguments and results, in which sums over mesh axes are
dims in front of values, summed where that is cheapest.
Order: `linear` (ops that a sum may be moved past), `reach` (how far it could be),
`flow` and `sites` (how far it is worth it under a plan), `accumulated` (in loops under
any), `choice` (as text); `values`, `pieces`,
`loops`, `remats` and `emit` (the new jaxpr).
"""

from rhino_jax.passes.deferred_reductions.accumulated import accumulated
from rhino_jax.passes.deferred_reductions.choice import (
    DeferredGroup,
    as_text,
    from_text,
)
from rhino_jax.passes.deferred_reductions.emit import delayed
from rhino_jax.passes.deferred_reductions.sites import Site, SitePrices, sites


__all__ = [
    "DeferredGroup",
    "Site",
    "SitePrices",
    "accumulated",
    "as_text",
    "delayed",
    "from_text",
    "sites",
]
