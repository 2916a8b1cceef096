"""From a solution to a plan, in the terms of the program.

In: the problem of one mesh, and an option of every node.
Out: a `rhino_jax.plan.plan.PlanData`; where nothing fits, an `InfeasiblePlanError`.
Order: `reasons` (why a collective is sent), `traffic` (all collectives), `extract`
(specs, predictions and memory), `line_times` (compute by line), `notes` (what is
unusual), `infeasible` (culprits and the nearest fix), `assemble` (the plan).
"""
