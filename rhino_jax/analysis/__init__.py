"""What a program is, whatever the mesh.

In: an `ir.Program`, and of the hardware only how its compiler fuses and overlaps.
Out: `program_analysis.ProgramAnalysis`, made once and read by the model of every mesh.
Order: `inline_regions` (program → `graph`), `uses` and `matmul_depth` (who reads what,
how many matmuls deep), `hoisting`, `materialised` (what touches memory), `liveness`
(when), `kernels` (what runs as one), `slack` (what can hide), `dim_classes` (which dims
are one index range), `padding` and `lanes` (which may be cut unevenly),
`equivalence` (which nodes have the same options).
None of it depends on sizes of mesh axes; what does is in `rhino_jax.model`.
"""
