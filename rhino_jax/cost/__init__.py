"""Seconds and bytes of one op, one collective, one reshard: pure functions.

In: local shapes, specs, and a mesh laid over hardware.
Out: seconds, bytes, and `reshard.ReshardStep`s; nothing here knows graphs or options.
Order: `collectives` (time of one collective), `reshard` and `combine` (the collectives
that change a sharding, or reduce partial sums), `compute` (time of one kernel, model
FLOPs; padding of shapes, in memory and in arithmetic), `grouped` (tiles of a grouped
matmul), `corrections` (of a program's costs, by its compiled plans).

To add a kind of collective: a record in `rhino_jax.ir.collectives`; `collectives` has
the time of each pattern on every topology. A kind that reshards may use is also a step
in `reshard`, and one that sums is one in `combine`.
"""
