"""Values that the backward pass makes again, or fetches from the host's memory.

In: a closed jaxpr, its program, and a `choice.Choice` as text.
Out: a closed jaxpr of the same results, with less to keep for the backward pass.
Order: `lines` (regions with calls entered), `late` (what is backward), `stacks` (what
loops keep), `choice`, `again` and `decided` (what runs again), `equations`, `slices`,
`remade`, `offload`, `frame`, `emit` (the new jaxpr), `written_anew` (the pass);
`numbers`, `as_kept` (a pass: no jax.checkpoint).
"""
