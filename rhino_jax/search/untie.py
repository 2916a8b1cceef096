"""Repeats that choose differently, where memory binds.

Nodes that choose alike hold memory all or none: a budget that half of the layers would
have to save for, all save for. Choices of the classes that are cheapest at the best
prices of memory, of which some fit and some do not, are merged node by node.
"""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.search.descent import descend
from rhino_jax.search.folding import Folding
from rhino_jax.search.merge import merge
from rhino_jax.search.overlap import Overlap
from rhino_jax.search.pool import Effort
from rhino_jax.search.solve import Solution


def untie(
    whole: Overlap, folding: Folding, found: Solution, effort: Effort
) -> Solution:
    """The solution of all nodes: what the classes' stands for, or a better one.

    Args:
      whole: of all nodes.
      folding: their classes.
      found: of the classes, which may have nothing that fits.
      effort: limits.
    """
    known = None if found.labels is None else folding.expand(found.labels)
    tied = replace(found, labels=known)
    if found.priced is None or not effort.max_fusions:
        return tied
    near = [folding.expand(choice) for choice in found.priced.near]
    weighted = whole.weighted(found.priced.prices.weight)
    merged = merge(weighted, known, near, effort)
    if merged.labels is None:
        return tied
    labels = descend(whole, merged.labels)
    objective, peak = whole.step_s(labels), whole.problem.peak(labels)
    if objective >= found.objective:
        return tied
    return replace(
        tied,
        labels=labels,
        objective=objective,
        bound=min(found.bound, objective),
        peak=peak,
        smallest_peak=min(found.smallest_peak, peak),
        variables=max(found.variables, merged.variables),
    )
