"""What a planned step keeps for its backward pass, and what it had better make again.

In: a `records.SolvedMesh`, which need not fit, and a budget.
Out: a `passes.remat.choice.RematChoice` for the pass "recompute", and what it costs.
Order: `candidates` reads values, bytes, seconds and times off the model into `rows`;
`choice` asks `rhino_jax.solver.remat`, with `parts` of loops apart, and says the
answer in value ids; `policies` are known answers, by name; `stacked` asks what loops
stack where that costs time, `in_flight` asks for stages, whose `tasks` are each
compiled on their own.
"""
