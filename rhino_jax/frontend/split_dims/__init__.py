"""Merged dims, split again into their parts: see `split_merged_dims`.

In: a jaxpr.
Out: a jaxpr of the same arguments and results, whose values have the parts as separate
dims; the same jaxpr where that is of no use.
Order: `forms` (values by their parts), `ops` (ops on such values), `flows`
(which dims are worth splitting), `emit` (the new jaxpr).
"""

from rhino_jax.frontend.split_dims.emit import split_merged_dims


__all__ = ["split_merged_dims"]
