"""Options and their prices on one mesh: the problem that the engine solves.

In: a `ProgramAnalysis`, a mesh laid over hardware, pins and the memory limit.
Out: `build.MeshModel`: of every node its options, and an `solver.Problem` of their
costs, of tables between neighbours, and of memory over time.
Order: `strategies` (mesh axes → an op's factors), `op_collectives` (what that sends),
`options` (both of every node, with costs), `sizes` (bytes per device), `resharding`
(a table for every edge), `packing`, `reversals`, `channels_last` and `column_sums`
(kernels that compilers add or save), `neighbourhood` (fewer options, where all are too
many), `build` (the whole).
`axis_assignment` is a view of the options for `rhino_jax.recipes`.
"""
