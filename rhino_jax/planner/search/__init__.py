"""From a program and a target to a plan: the driver and its passes.

In: an `ir.Program`, candidate meshes, a `Target` and a `records.Request`.
Out: a `plan.PlanData`, or `InfeasiblePlanError` with the culprits.
Order: `driver` runs the `passes`: inline and analyse (`rhino_jax.analysis`), estimate
costs (`mesh_problem`), fold (`folding`), recipes (`recipe_choices`), solve
(`solve_on_mesh`), and read a plan back (`read_back`) from the result (`found`).
`candidates` reads back several; `carried` starts from another program's solution;
or solves with other pins; `together` plans several programs at once; `remat` chooses
what to recompute; `forms` writes passes as text; `records` and `compare` bound the
search.
"""
