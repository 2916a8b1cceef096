"""Arguments that a function changes in place, as arrays in and arrays out.

In: a call whose arguments hold Flax NNX objects or references of JAX.
Out: a pure call on their arrays, and what writes the results back.
Order: `held` (an object as a pytree node), `nnx_graph` and `references` (the two
kinds), `written` (what a function leaves in them), `calling` (inside of the trace),
`lift` (around it).
"""
