"""The batch cut in time: one loop over micro-batches, and what is done around it.

In: a closed jaxpr, its `Program`, and a choice as text, as `{"count": 4}`.
Out: `microbatched`, a closed jaxpr of the same arguments and results; `may_cut`, what
would run where, or the refusal.
Order: `batch` (inputs that hold it), `blocks` (the program, calls taken apart),
`states` (what a value is to a piece), `linear` and `flow` (what ops make of that),
`regions`, `analysis` (the whole program), `demand` (what runs where), `cut` (that, as
data), `cutting` (all of these); then `pieces`, `emit`, `emit_piece`, `emit_regions`.
"""

from rhino_jax.transform.microbatch.cut import Crossing, Cut, Loop
from rhino_jax.transform.microbatch.passed import may_cut, microbatched


__all__ = ["Crossing", "Cut", "Loop", "may_cut", "microbatched"]
