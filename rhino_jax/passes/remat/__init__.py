"""Rematerialization and host offload of values that the backward pass reads.

In: a closed jaxpr, its program, and a `choice.RematChoice` as text.
Out: a closed jaxpr with the same results and fewer residuals on the device.
Order: `late` (which ops are of the backward pass), `residual_stacks` (residuals that
loops stack), `choice`, `rerun` and `decided` (which ops run again), `frame`
(values and slices of stacks, on the device or the host), `emit` (the pass); `unremat`
(a pass that removes jax.checkpoint).
"""
