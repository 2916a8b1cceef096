"""Pipeline stages: from the user's options to stage cuts and shardings.

In: a `variant_search.Search` with its options, and the sizes of the stages.
Out: a `plan.plan.PlanData` with a pipeline.
Order: `pins` (ops pinned to stages), `shapes` (searches of submeshes, their
speeds, bounds of the step), `problem` (a step as `pipeline.cut` sees it), `schedules`
(compared), `cuts` (stage cuts, for numbers of micro-batches), `loops` (over layers,
split), `planned` (one submesh; `transfers`: its costs), `groups` (all), `remat`,
`assembled` (one plan), `fitted` (by one schedule, until all fit; planned again),
`slices` (of sequences), `plan` (the best), `auto` (number of stages), `spmd_pipeline`
(stages as a mesh axis).
"""
