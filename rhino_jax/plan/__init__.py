"""What was decided, as data.

In: decisions and predictions from `rhino_jax.planner.search`, and the user's pins.
Out: `plan.PlanData`, which can be saved, loaded, compared and kept.
Order: `pins` (what the user holds fixed), `decisions` and `records` (what was chosen,
and what it costs), `while_loops`, `stages`, `plan`, `lines` (of the user's source, as
they are now), `trees` (specs in the shape of the arguments), `fingerprint`, `outline`
and `fits` (which program it is for), `density` (how much of it is annotated),
`split_views` (what never is, on TPU), `files` (saved plans, and plans made before),
`diff`, `kept`, `shared` and `plans` (plans of several programs).
"""
