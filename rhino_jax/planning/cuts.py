"""Which passes a program is planned with: micro-batches, recompute, open sums.

What needs none of them is planned once, as it is. Where that does not fit, or would be
faster with more memory, variants that hold less are planned too, each with shardings of
its own, and the one with the shortest predicted step that fits is kept.
"""

from __future__ import annotations

from rhino_jax.ir.transform import MICROBATCHES, Transform, chosen
from rhino_jax.plan.plan import Plan
from rhino_jax.planning.partial_sums import with_open_sums
from rhino_jax.planning.search import Search


def best_cut(search: Search, microbatches: int | str, recompute: str) -> Plan:
    """The plan of the variant of a program that is predicted fastest within memory.

    Args:
      search: of the program as its user wrote it.
      microbatches, recompute: as of `auto_shard`.
    Raises:
      InfeasiblePlanError: nothing fits, whatever is done.
      MicrobatchError: the program has no batch that can be cut as it is asked to be.
    """
    if isinstance(microbatches, int) and microbatches > 1:
        search = search.after([cut_in(microbatches)])
    plan = search.plan()
    return with_open_sums(search, plan)[1]


def cut_in(count: int) -> Transform:
    """The batch, cut into so many micro-batches."""
    return chosen(MICROBATCHES, {"count": count})
