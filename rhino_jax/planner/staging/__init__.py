"""Pipeline stages: from the user's options to stage cuts and shardings.

In: a `variant_search.Search` with its options, and the sizes of the stages.
Out: a `plan.plan.PlanData` with a pipeline.
Order: `shapes` (searches of submeshes, their speeds, bounds of the step), `problem` (a
step as `pipeline.cut` sees it, with ops pinned to stages), `schedules` (compared),
`cuts` (stage cuts, for numbers of micro-batches), `loops` (over layers, split),
`planned` (one submesh), `remat`, `assembled` (all: costs, one plan), `groups` (planned
until all fit), `fitted` (by one schedule; planned again), `slices` (of sequences),
`plan` (the best), `spmd_pipeline` (stages as a mesh axis).
"""
