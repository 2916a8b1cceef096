"""What was decided, as data.

In: decisions and predictions from `rhino_jax.search`, and the user's pins.
Out: `plan.Plan`, which can be saved, loaded, compared and kept.
Order: `pin_trees`, `pins` and `interior_pins` (what the user holds fixed), `decisions`
and `records` (what was chosen, and what it costs), `plan`, `trees` (specs in the shape
of the arguments), `fingerprint` and `fits` (which program it is for), `density` (how
much of it is annotated), `split_views` (what never is, on TPU), `schema`, `tree_json`
and `store` (files), `cache_key` and `cache` (plans made before), `diff`, `kept` and
`shared` (plans of several programs).
"""
