"""Work of a compiled program: FLOPs and memory traffic, in run order.

In: a `rhino_jax.verify.hlo.module.Module`.
Out: `program.ProgramWork`.
Order: `arrays` (types as HLO writes them), `flops` and `traffic` (of one instruction),
`program` (of all, with trip counts).
"""
