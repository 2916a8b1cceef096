"""From a program and a target to a plan: the driver and its passes.

In: an `ir.Program`, meshes to compare, a `Target` and a `records.Request`.
Out: a `plan.Plan`, or `InfeasiblePlanError` with the culprits.
Order: `driver` runs the `passes`: inline and analyse (`rhino_jax.analysis`), price
(`mesh_problem`), fold (`folding`), recipes (`recipe_choices`), solve (`solve_on_mesh`),
read back (`read_back`). `candidates` reads back several, `together` and `adding` plan
several programs at once; `keeping` says what a step that does not fit had better make
again. `forms` and `dump` write passes as text, `limits` says how far the search goes.
"""
