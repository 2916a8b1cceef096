"""The intermediate representation of a program, without JAX and without hardware.

In: nothing of ours; `rhino_jax.frontend` builds programs from jaxprs.
Out: `program.Program`: values, ops with their factors and traits, regions, and the
paths of arguments and results.
Order: `factor` (index ranges of an op's dims), `traits` (properties of ops), `op`,
`program`, `axes` (the dims that hold an axis, as ops split and merge them; borders of
regions), `spec` (how one value is sharded), `places` (names of source lines and scopes;
trip counts that users state there), `verifier` (invariants), `printer` (stable text),
`coverage` (ops without a rule), `collectives` (their kinds), `congruence` (equal values
of two programs), `transform` (record of what was changed before planning).
Ids of values and ops are positions: the same walk over the source gives the same ids,
which is how a plan is applied.
"""
