"""Analyses of a program that hold on every mesh.

In: an `ir.Program`, and of the hardware only how its compiler fuses and overlaps.
Out: `program_analysis.ProgramAnalysis`, computed once and shared by the models of all
meshes.
Order: `inline_regions` (program → `graph`), `shared_copies`, `row_kernels`, `uses` and
`matmul_depth` (readers, levels between matmuls), `materialised` (values in memory),
`temporaries` (converted and masked copies), `liveness` (live ranges), `kernels`
(fusions), `on_chip` (values that stay on the chip), `slack` (what can overlap),
`dim_classes` (dims that are one index range), `roles` (data, parameters, state; batch
and sequence), `reduction_levels` (what one all-reduce may combine), `padding` (uneven
shards), `equivalence` (nodes with equal options), `program_analysis`.
`roles.data_inputs` is for passes, too; the others are for models of programs on meshes.
Nothing here depends on sizes of mesh axes; what does is in `rhino_jax.model`.
"""
