"""The batch cut in time: one loop over micro-batches, and what is done around it.

In: a closed jaxpr, its `Program`, and a choice as text, as `{"count": 4}`.
Out: `microbatched`, a closed jaxpr of the same arguments and results; `may_cut`, what
would run where, or the refusal.
Order: `choice`, `flow` (what each value is to a piece), `fission` (scans in two where
layers need sums over the batch), `demand` (what runs where), `cut` (that, as data),
`meeting` (what runs on the whole batch), `cutting` (all of these, and what is refused),
`emit` (the new program), `passed` (the pass).
"""

from rhino_jax.passes.microbatch.cut import LoopCrossing, MicrobatchCut, MicrobatchLoop
from rhino_jax.passes.microbatch.passed import may_cut, microbatched


__all__ = ["LoopCrossing", "MicrobatchCut", "MicrobatchLoop", "may_cut", "microbatched"]
