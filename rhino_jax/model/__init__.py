"""Options of every node and their costs on one mesh: the problem that the solver
solves.

In: a `ProgramAnalysis`, a mesh laid over hardware, pins and the memory limit.
Out: `build.MeshModel`: the options of every node, and a `solver.Problem` of their
costs, of reshard tables between neighbours, and of memory over time.
Order: `strategies` (mesh axes → an op's factors), `op_collectives` (collectives inside
ops), `sizes` (bytes per device, and borders of shifts), `traffic` (bytes that kernels
move), `options` (strategies and costs of every node), `resharding` (a table for every
edge), `packing`, `gpu_kernels`, `tpu_kernels` and `channels_last` (kernels and memory
traffic that compilers add or save), `constants` (constants), `neighbourhood` (fewer
options, where all are too many), `build` (the model).
"""
