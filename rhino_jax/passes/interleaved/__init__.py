"""Interleaved storage: contiguous shards of fused weights with a share of every part.

In: a closed jaxpr with its program; the dims of inputs that are interleaved, and how
(`rhino_jax.ir.transform`).
Out: a closed jaxpr of arguments and results of the same shapes, in which values
computed from these inputs are interleaved as well, up to where they are split.
The same rewrite interleaves batches that a program concatenates, whose inputs and
outputs stay as they are (`BATCHES`).
Order: `moves` (arrays in interleaved and logical order, splits and reshapes per block),
`reach` (all interleaved dims), `sites` (dims worth interleaving), `emit`
(the new jaxpr).
"""

from rhino_jax.ir.transform import BLOCKS, JOINED
from rhino_jax.passes.interleaved.emit import interleave, interleave_batches
from rhino_jax.passes.interleaved.moves import all_stored, all_written
from rhino_jax.passes.interleaved.sites import (
    batch_choices,
    split_inputs,
    storage_choices,
)
from rhino_jax.passes.program_pass import Gain, ProgramPass, Trial, TrialKind


PASS = ProgramPass(BLOCKS, interleave, storage_choices)
BATCHES = ProgramPass(
    JOINED,
    interleave_batches,
    batch_choices,
    Trial(TrialKind.WHILE_BETTER, lambda choice: JOINED, None, JOINED, gain=Gain.TIME),
)

__all__ = ["BATCHES", "PASS", "all_stored", "all_written", "interleave", "split_inputs"]
