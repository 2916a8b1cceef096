"""A plan and a function → a program that runs as planned.

In: a `plan.PlanData`, the user's function and its arguments.
Out: `sharded.ShardedFunction`, and JAX's `Lowered` and `Compiled` of it.
Order: `sharded` (the decorator's object) → `bound` (one signature: traced, planned) →
`interpret` (its jaxpr again, with `constraints` on the way; `on_shards` runs what XLA
would gather, or partition wrongly, `indexing` clamps what it would lose) → `lowering`.
Beside them: `meshes` (which mesh), `donation`, `copies` and `feedback` (whose memory),
`placing` and `belonging` (state where the plan wants it), `storage` (in which order),
`with_plan` (a function under a plan that exists).
"""
