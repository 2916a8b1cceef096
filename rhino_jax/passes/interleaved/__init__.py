"""Inputs stored in blocks, so that a contiguous cut has its share of every part.

In: a closed jaxpr with its program; which dims of inputs are in blocks, and how
(`rhino_jax.ir.blocks`).
Out: a closed jaxpr of arguments and results of the same shapes, in which values made of
them are in blocks as well, up to where they are split.
Order: `order` (arrays in blocks and as written), `links` (dims that are one range),
`moves` (splits and reshapes, of every block), `reach` (all that is in blocks), `sites`
(which inputs are worth it), `emit` (the new jaxpr).
"""

from rhino_jax.passes.interleaved.emit import in_blocks
from rhino_jax.passes.interleaved.order import all_stored, all_written
from rhino_jax.passes.interleaved.sites import split_inputs


__all__ = ["all_stored", "all_written", "in_blocks", "split_inputs"]
