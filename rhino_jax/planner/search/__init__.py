"""From a program and a target to a plan: the driver and its passes.

In: an `ir.Program`, meshes to compare, a `Target` and a `records.Request`.
Out: a `plan.PlanData`, or `InfeasiblePlanError` with the culprits.
Order: `driver` runs the `passes`: inline and analyse (`rhino_jax.analysis`), price
(`mesh_problem`), fold (`folding`), recipes (`recipe_choices`), solve (`solve_on_mesh`),
read back (`read_back`) what was `found`. `candidates` reads back several; `carried`
takes over another program's choice; `together` and `adding` plan several at once;
`held` solves with other pins; `remat` says what to make again; `forms` and `dump`
write passes as text, `limits` and `more_axes` say how far to go.
"""
