"""Mixtures of experts: tokens are sorted by expert on each device, not all together.

A dropless mixture of experts sorts all tokens of a batch by expert: each device would
gather tokens of all others. Yet what is computed from a token is the same whatever
others it is sorted with. Sorted in blocks, as many as devices share the batch, tokens
stay where they are. Experts in parts have the rows of their experts alone: looked up in
blocks of several devices, tokens are gathered, and results summed ("ring of experts",
MaxText's `use_ring_of_experts`); in a block for each device, rows are exchanged.

In: a closed jaxpr, its `Program`, and a choice as text, as `{"count": 8, "parts": 1}`.
Out: a closed jaxpr of the same arguments and results.
Order: `moves` (ops on rows in blocks), `buffers` (rows of parts), `emit` (rows in the
order of experts, by `microbatch.flow.orders`), `rounds` (parts), `choice` (the pass).
"""

from rhino_jax.passes.experts.choice import PASS


__all__ = ["PASS"]
