"""Pipeline stages: from the user's options to stage cuts and shardings.

In: a `variant_search.Search`, the numbers of stages and micro-batches, and a schedule.
Out: a `plan.plan.PlanData` with a pipeline.
Order: `pins` (ops pinned to stages), `submesh_search`, `shapes` (submeshes and their
speeds), `problem` (a step as `pipeline.cut` sees it), `schedules` (compared), `cuts`
(stage cuts, for numbers of micro-batches), `loops` (over layers, split), `bounds` (of
the step), `planned` (one submesh; `task_memory`, `transfers`: its costs), `groups`
(all), `remat`, `assembled` (one plan), `solved` (until all fit; planned again),
`fitted` (by one schedule), `slices` (of sequences), `plan` (the best), `auto` (number
of stages), `spmd_pipeline` (stages as a mesh axis).
"""
