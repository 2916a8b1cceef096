"""Deferred reductions: leave sums over mesh axes unreduced past linear ops and loops.

In: a closed jaxpr with its program; the sharding of a first plan of it, and its costs.
Out: a closed jaxpr of the same arguments and results, in which partial sums over mesh
axes are leading dims of values, reduced where that is cheapest.
Order: `sites` (the values that stay unreduced, also as text; those that can, as ops are
linear, and those that should: a minimum cut), `emit`.
"""

from rhino_jax.ir.transform import DEFERRED_REDUCTIONS
from rhino_jax.passes.deferred_reductions.emit import defer_reductions
from rhino_jax.passes.deferred_reductions.sites import (
    DeferredGroup,
    Site,
    SitePrices,
    accumulated,
    as_text,
    from_text,
    sites,
)
from rhino_jax.passes.program_pass import ProgramPass


PASS = ProgramPass(DEFERRED_REDUCTIONS, defer_reductions)

__all__ = [
    "PASS",
    "DeferredGroup",
    "Site",
    "SitePrices",
    "accumulated",
    "as_text",
    "defer_reductions",
    "from_text",
    "sites",
]
