"""From a solution to a plan, in the terms of the program.

In: the problem of one mesh, and an option of every node.
Out: a `rhino_jax.plan.plan.PlanData`; where nothing fits, an `InfeasiblePlanError`.
Order: `reasons` (why a collective is sent), `traffic` (all collectives), `extract`
(specs, predictions, memory, compute by line), `assemble` (the plan, with notes on what
is unusual; or culprits and the nearest fix).
"""
