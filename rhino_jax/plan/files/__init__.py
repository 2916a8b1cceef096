"""Plans on disk: files that users save, and the cache.

In: a `rhino_jax.plan.plan.PlanData`, or a file.
Out: JSON with a schema version and checksum, or the plan that it holds.
Order: `schema` (a plan and its trees as data), `store` (files),
`cache` (cached plans, by everything that they depend on).
"""
