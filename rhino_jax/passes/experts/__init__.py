"""Mixtures of experts: tokens are sorted by expert on each device, not all together.

A dropless mixture of experts sorts all tokens of a batch by expert: each device would
gather tokens of all others. Yet what is computed from a token is the same whatever
others it is sorted with. Sorted in blocks, as many as devices share the batch, tokens
stay where they are; a dim of the blocks is sharded as a batch is. Experts in parts have
an order for each part, in which tokens of its experts come first: sharded, tokens are
gathered, and results summed, where the weights of all experts would be ("ring of
experts", MaxText's `use_ring_of_experts`).

In: a closed jaxpr, its `Program`, and a choice as text, as `{"count": 8, "parts": 1}`.
Out: a closed jaxpr of the same arguments and results.
Order: `moves` (ops on rows in blocks), `emit` (rows in the order of experts, by
`microbatch.flow.orders`; the new program, and the pass).
"""

from rhino_jax.passes.experts.emit import PASS


__all__ = ["PASS"]
