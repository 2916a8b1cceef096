"""Plans on disk: files that users save, and the cache.

In: a `rhino_jax.plan.plan.PlanData`, or a file.
Out: JSON with a schema version and checksum, or the plan that it holds.
Order: `tree_json` and `stage_json` (parts), `schema` (a plan, as data), `store` (files,
also of older versions), `cache` (cached plans, by everything that they depend on).
"""
