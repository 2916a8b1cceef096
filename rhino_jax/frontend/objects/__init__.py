"""Arguments that a function mutates in place, as arrays in and arrays out.

In: a call whose arguments hold Flax NNX objects or references of JAX.
Out: a pure call on their arrays, and the write-back of its results.
Order: `held` (an object as a pytree node, its state after a call; references),
`nnx_graph` (Flax NNX), `lift` (inside the trace, and around it).
"""
