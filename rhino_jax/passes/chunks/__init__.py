"""A long row in pieces: logits of a whole vocabulary that never exist whole.

In: a closed jaxpr, its `Program`, and a choice as text, as `{"count": 8}`.
Out: `chunked`, a closed jaxpr of the same arguments and results; `may_chunk`, what
would run where, or the refusal.
Order: `heads` (products with a parameter whose results are the longest), `part` (what
works on such a result, forward and backward), `inside` (within a user's loop over
micro-batches), `passed` (that part, cut along tokens as these cut a batch).

Only what takes one loop is cut, so nothing is computed twice. A causal program is not
cut along its whole sequence (TeraPipe): gradients of early keys wait for the last
token, so all activations are held as before; that pays between pipeline stages alone.
"""

from rhino_jax.passes.chunks.passed import chunked, may_chunk


__all__ = ["chunked", "may_chunk"]
