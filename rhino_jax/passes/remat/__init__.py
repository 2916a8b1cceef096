"""Rematerialization and host offload of values that the backward pass reads.

In: a closed jaxpr, its program, and a `choice.RematChoice` as text.
Out: a closed jaxpr with the same results and fewer residuals on the device.
Order: `late` (which ops are of the backward pass, and residuals that loops stack for
them), `choice`, `rerun` (which ops run again), `frame`
(values and slices of stacks, on the device or the host), `emit` (the pass); `unremat`
(a pass that removes jax.checkpoint).
"""
