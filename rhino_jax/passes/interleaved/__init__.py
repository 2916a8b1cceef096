"""Interleaved storage: contiguous shards of fused weights with a share of every part.

In: a closed jaxpr with its program; the dims of inputs that are interleaved, and how
(`rhino_jax.ir.transform`).
Out: a closed jaxpr of arguments and results of the same shapes, in which values
computed from these inputs are interleaved as well, up to where they are split.
The same rewrite interleaves batches that a program concatenates, whose inputs and
outputs stay as they are (`BATCHES`).
Order: `moves` (arrays in interleaved and logical order, splits and reshapes per block),
`sites` (dims worth interleaving, and all that are then interleaved), `emit` (the new
jaxpr).
"""

from rhino_jax.passes.interleaved.emit import BATCHES, PASS
from rhino_jax.passes.interleaved.moves import all_stored, all_written


__all__ = ["BATCHES", "PASS", "all_stored", "all_written"]
