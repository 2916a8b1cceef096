"""Plans as data: all decisions about a program, with their predicted cost.

In: decisions and predictions from `rhino_jax.planner.search`, and the user's pins.
Out: `plan.PlanData`, which can be saved, loaded and cached.
Order: `pin_trees` (users' pins → paths), `form_pins`, `resolved_pins` (paths, lines and
scopes → positions, on one mesh), `decisions` (specs, and where they are annotated) and
`records` (their cost), `while_loops`, `stages`, `plan`, `lines` (current source lines),
`trees` (specs in the shape of the arguments), `fingerprint` and `fits` (the program
that a plan is for), `files` (saved and cached plans), `kept` (layouts reused from
another plan), `shared` (plans of several programs).
"""
