"""Micro-batches: run a step as a loop over slices of its batch, accumulating gradients.

In: a closed jaxpr, its `Program`, and a choice as text, as `{"count": 4}`.
Out: `run_in_microbatches`, a closed jaxpr of the same arguments and results; `may_cut`,
the schedule of ops without emitting it, or the error.
Order: `cut` (options and schedule as data), `flow` (how each value depends on the
batch), `demand` (which ops run in which loop), `cutting` (the analysis as a whole, with
scans split whose layers need sums over the batch, and its refusals), `emit`
(the new program), `passed` (the pass).
"""

from rhino_jax.passes.microbatch.cut import MicrobatchCut
from rhino_jax.passes.microbatch.passed import (
    PASS,
    cut_in,
    may_cut,
    run_in_microbatches,
)


__all__ = [
    "PASS",
    "MicrobatchCut",
    "cut_in",
    "may_cut",
    "run_in_microbatches",
]
