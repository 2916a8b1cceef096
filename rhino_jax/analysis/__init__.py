"""Analyses of a program that hold on every mesh.

In: an `ir.Program`, and of the hardware only how its compiler fuses and overlaps.
Out: `program_analysis.ProgramAnalysis`, computed once and shared by the models of all
meshes.
Order: `inline_regions` (program → `graph`), `shared_copies`, `views`, `uses` and
`matmul_depth` (readers, and levels between matmuls), `hoisting`, `materialised` (values
in memory), `liveness` (live ranges), `kernels` (fusions), `slack` (what can overlap),
`dim_classes` (dims that are one index range), `padding` and `lanes` (uneven shards),
`masked_groups`, `equivalence` (nodes with equal options).
Nothing here depends on sizes of mesh axes; what does is in `rhino_jax.model`.
"""
