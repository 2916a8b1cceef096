"""From a program and a target to a plan: the driver and its passes.

In: an `ir.Program`, candidate meshes, a `Target` and a `records.Request`.
Out: a `plan.PlanData`, or `InfeasiblePlanError` with the culprits.
Order: `driver` runs the `passes`: inline and analyse (`rhino_jax.analysis`), estimate
costs (`mesh_problem`), fold, recipes and solve (`folding`), and read a plan back
(`read_back`) from the result (`found`, which is also solved again with other pins);
`compare` meshes; `together` plans several programs at once; `remat` chooses what to
recompute; `records` has the request and the limits of the search.
"""
