"""Values that the backward pass makes again, or fetches from the host's memory.

In: a closed jaxpr, its program, and a `choice.MicrobatchChoice` as text.
Out: a closed jaxpr of the same results, with less to keep for the backward pass.
Order: `regions` (regions with calls entered), `late` (what is backward),
`residual_stacks` (what loops keep), `choice`, `rerun` and `decided` (what runs again),
`equations`, `slices`, `recomputed`, `offload`, `frame`, `emit` (the new jaxpr),
`rewrite` (the pass); `numbers`, `unremat` (a pass: no jax.checkpoint).
"""
