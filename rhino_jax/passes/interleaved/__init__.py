"""Interleaved storage: contiguous shards of fused weights with a share of every part.

In: a closed jaxpr with its program; the dims of inputs that are interleaved, and how
(`rhino_jax.ir.transform`).
Out: a closed jaxpr of arguments and results of the same shapes, in which values
computed from these inputs are interleaved as well, up to where they are split.
Order: `order` (arrays in interleaved and logical order), `moves` (splits and reshapes
per block), `reach` (all interleaved dims), `sites` (inputs worth interleaving), `emit`
(the new jaxpr).
"""

from rhino_jax.ir.transform import BLOCKS
from rhino_jax.passes.interleaved.emit import interleave
from rhino_jax.passes.interleaved.order import all_stored, all_written
from rhino_jax.passes.interleaved.sites import split_inputs, storage_choices
from rhino_jax.passes.program_pass import ProgramPass


PASS = ProgramPass(BLOCKS, interleave, storage_choices)

__all__ = ["PASS", "all_stored", "all_written", "interleave", "split_inputs"]
