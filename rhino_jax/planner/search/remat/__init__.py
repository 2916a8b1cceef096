"""The choice of residuals that a planned step saves, recomputes or offloads.

In: a `records.SolvedMesh`, which need not fit, and a budget.
Out: a `passes.remat.choice.RematChoice` for the pass "recompute", and its cost.
Order: `candidates` reads values, bytes, seconds and times off the model into rows
(`planner.staging.remat` those of a pipeline stage, whose tasks are compiled
separately); `choice` has the rows, asks `rhino_jax.solver.remat`, and knows common
policies by name.
"""
