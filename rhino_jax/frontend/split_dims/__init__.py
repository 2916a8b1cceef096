"""Dims that a reshape merged, kept apart: see `split_merged_dims`.

In: a jaxpr.
Out: one of the same arguments and results, whose values have the parts as dims of their
own; the same jaxpr where that is of no use.
Order: `forms` (values by their parts), `ops`, `moved` and `indexed` (what ops become on
them), `flows` (which are worth it), `emit` (the new jaxpr).
"""

from rhino_jax.frontend.split_dims.emit import split_merged_dims


__all__ = ["split_merged_dims"]
