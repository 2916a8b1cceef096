"""From a program and a target to a plan: the driver and its passes.

In: an `ir.Program`, meshes to compare, a `Target` and a `records.Request`.
Out: a `plan.Plan`, or `InfeasiblePlanError` with the culprits.
Order: `driver` runs the `passes`: inline and analyse (`rhino_jax.analysis`), price
(`mesh_problem`), fold (`fold`, `symmetry`), recipes (`recipe_choices`), solve
(`solve_on_mesh`, `solve_folded`, `unfold`), read back (`assemble`, of `extract`,
`traffic` and `reasons`). `candidates` reads back several, `infeasible` says why there
is none, `together` and `adding` plan several programs at once.
"""
