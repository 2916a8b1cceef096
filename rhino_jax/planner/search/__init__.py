"""From a program and a target to a plan: the driver and its passes.

In: an `ir.Program`, candidate meshes, a `Target` and a `records.Request`.
Out: a `plan.PlanData`, or `InfeasiblePlanError` with the culprits.
Order: `driver` runs the `passes`: inline and analyse (`rhino_jax.analysis`), estimate
costs (`mesh_problem`), fold (`folding`), recipes (`recipe_choices`), solve
(`solve_on_mesh`), and read a plan back (`read_back`) from the result (`found`).
`candidates` reads back several; `carried` starts from another program's solution;
`together` and `adding` plan several programs at once; `held` solves with other pins;
`remat` chooses what to recompute; `forms` and `dump` write passes as text; `limits` and
`more_axes` bound the search.
"""
