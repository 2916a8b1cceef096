"""The choice of residuals that a planned step saves, recomputes or offloads.

In: a `records.SolvedMesh`, which need not fit, and a budget.
Out: a `passes.remat.choice.RematChoice` for the pass "recompute", and its cost.
Order: `candidates` reads values, bytes, seconds and times off the model into `rows`;
`choice` calls `rhino_jax.solver.remat`, with `parts` of loops apart, and returns the
answer in value ids; `policies` are known answers, by name; `stacked` chooses the
residuals of loops where stacking costs time; `in_flight` chooses for pipeline stages,
whose `tasks` are compiled separately.
"""
