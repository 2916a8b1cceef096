"""A choice read back, in the terms of the program.

In: the problem of one mesh, and an option of every node.
Out: a `rhino_jax.plan.plan.PlanData`; where nothing fits, an `InfeasiblePlanError`.
Order: `reasons` (why a collective is there), `traffic` (what is sent), `extract`
(specs, predictions and memory), `line_times` (compute by line), `notes` (what is odd),
`infeasible` (culprits and the nearest fix), `assemble` (all of it, as a plan).
"""
