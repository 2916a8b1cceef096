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
    """The solution of all nodes, better than that of the classes where that can be.

    Args:
      whole: of all nodes.
      folding: their classes.
      found: of the classes; something fits.
      effort: limits.
    """
    assert found.labels is not None
    tied = replace(found, labels=folding.expand(found.labels))
    if found.priced is None or folding.is_identity or not effort.max_fusions:
        return tied
    near = [folding.expand(choice) for choice in found.priced.near]
    weighted = whole.weighted(found.priced.weight)
    merged = merge(weighted, tied.labels, near, effort)
    if merged.labels is None:
        return tied
    labels = descend(whole, merged.labels)
    objective = whole.step_s(labels)
    if objective >= found.objective:
        return tied
    return replace(
        tied,
        labels=labels,
        objective=objective,
        bound=min(found.bound, objective),
        peak=whole.problem.peak(labels),
        variables=max(found.variables, merged.variables),
    )
