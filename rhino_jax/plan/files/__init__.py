"""Plans on disk: files that users save, and the cache.

In: a `rhino_jax.plan.plan.PlanData`, or a file.
Out: JSON with a schema version and checksum, or the plan that it holds.
Order: `record_json`, `stage_json` and `tree_json` (parts), `schema` (a plan, as data),
`older` (files of older versions), `store` (files), `cache_key` (everything that a plan
depends on) and `cache` (cached plans).
"""
