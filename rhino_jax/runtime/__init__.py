"""Turn a plan and a function into a program that runs as planned.

In: a `plan.PlanData`, the user's function and its arguments.
Out: `sharded.ShardedFunction`, and JAX's `Lowered` and `Compiled` of it.
Order: `sharded` (the decorator's object) → `bound` (one signature: traced, planned) →
`spmd` (one SPMD program) or `tasks` (pipeline stages) → `interpret` (evaluates its
jaxpr with `constraints`; `ops_on_shards` and `windows` run ops on shards that XLA
would gather, or partition wrongly, `grouped` multiplies groups that XLA:GPU would mask,
`grouped_sets` one set of groups at a time, `indexing` clamps starts that it would
drop). Next to them: `meshes` (which mesh), `buffers` (donated, or fed back), `placing`
and `belonging` (state in the plan's shardings), `storage` (element order), `processes`
(several that agree on one plan).
"""
