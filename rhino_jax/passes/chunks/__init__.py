"""Chunked loss: compute logits over a vocabulary in chunks of tokens, never in full.

In: a closed jaxpr, its `Program`, and a choice as text, as `{"count": 8}`.
Out: `run_in_chunks`, a closed jaxpr of the same arguments and results; `may_chunk`, the
schedule of ops without emitting it, or the error.
Order: `heads` (output projections: matmuls with a parameter and the largest results),
`part` (ops on such a result, forward and backward), `passed` (the pass: these ops, in a
loop over chunks of tokens, also within a user's loop over micro-batches).

Only what takes one loop is chunked, so nothing is computed twice. A causal program is
not sliced along its whole sequence (TeraPipe): gradients of early keys wait for the
last token, so all residuals stay live as before; that pays only between pipeline
stages.
"""

from rhino_jax.passes.chunks.passed import PASS, may_chunk, run_in_chunks


__all__ = ["PASS", "may_chunk", "run_in_chunks"]
