"""A program as the planner knows it, without JAX and without hardware.

In: nothing of ours; `rhino_jax.frontend` builds what is here from a jaxpr.
Out: `program.Program`: values, ops with their factors and traits, regions, and the
paths of arguments and results.
Order: `factor` (what an op's dims are made of), `traits` (what an op is), `op`,
`program` (all of them), `spec` (how one value is cut), `places` (what source lines and
scopes are called), `verifier` (whether a program is well formed), `printer` (its stable
text), `coverage` (what no rule covers), `transform`, `while_trips` and `blocks` (what
was done to it).
Ids of values and ops are positions: the same walk over the source finds them again,
which is how a plan is applied.
"""
